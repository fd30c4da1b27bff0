"use strict";
/* Asks how the sweep stands, and for rows and figures again whenever runs were completed. Text is set as text. */
const LOOK = 2000; // milliseconds between two looks
const at = (id) => document.getElementById(id);
const table = { page: 0, sort: "", descending: false, filter: "" };
let version = null, seen = 0;

const make = (tag, text, more = {}) => Object.assign(document.createElement(tag), { textContent: text }, more);

const duration = (seconds) => {
  const minutes = Math.round(seconds / 60);
  return seconds < 90 ? `${Math.round(seconds)}s` : minutes < 90 ? `${minutes}m` : `${(minutes / 60).toFixed(1)}h`;
};

const said = (run) => {
  const parts = [run.phase, `${Math.round(100 * run.done)}%`];
  if (run.loss !== null) parts.push(`loss ${run.loss.toFixed(3)}`);
  if (run.seconds_left !== null) parts.push(`about ${duration(run.seconds_left)} left`);
  return `${run.name}: ${parts.join(", ")}${run.is_silent ? " (no output for minutes)" : ""}`;
};

function showStatus(status) {
  at("share").value = status.share;
  at("percent").textContent = `${Math.floor(100 * status.share)}%`;
  at("counts").textContent = Object.entries(status.counts).map(([state, n]) => `${n} ${state}`).join(", ") || "no runs yet";
  at("running").replaceChildren(...status.running.map((run) => make("li", said(run))));
  at("best").textContent = status.best ? `Best so far: ${status.best}` : "";
  at("remarks").replaceChildren(...status.remarks.map((remark) => make("li", remark)));
  at("problem").textContent = status.problem;
  const ended = status.ended.map((one) => make("li", `${one.state} ${one.runs}x: ${one.cause ?? "no reason given"}`));
  at("ended").replaceChildren(...(ended.length ? ended : [make("li", "No run failed or ended early.")]));
  document.body.dataset.running = status.is_running;
}

async function showFigure(figure) {
  const answer = await fetch(`/figure/${figure.dataset.figure}?v=${version}`);
  const image = figure.querySelector("img"), before = image.src;
  figure.querySelector(".reason").textContent = answer.ok ? "" : `(${await answer.text()})`;
  image.hidden = !answer.ok;
  if (answer.ok) {
    image.src = URL.createObjectURL(await answer.blob());
    if (before) URL.revokeObjectURL(before);
  }
}

async function showRuns() {
  const asked = new URLSearchParams({ page: table.page, sort: table.sort, filter: table.filter });
  if (table.descending) asked.set("descending", "1");
  const found = await (await fetch(`/runs?${asked}`)).json();
  const head = document.createElement("tr"), frame = at("table-runs");
  for (const column of found.columns) {
    const cell = make("th", "", { scope: "col", className: column.is_number ? "number" : "" });
    const button = make("button", column.name, { type: "button", title: column.meaning });
    if (column.name === table.sort) cell.ariaSort = table.descending ? "descending" : "ascending";
    button.addEventListener("click", () => {
      table.descending = column.name === table.sort && !table.descending;
      Object.assign(table, { sort: column.name, page: 0 });
      showRuns();
    });
    cell.append(button);
    head.append(cell);
  }
  frame.querySelector("thead").replaceChildren(head);
  frame.querySelector("tbody").replaceChildren(...found.rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((text, i) => make("td", text, { className: found.columns[i].is_number ? "number" : "" })));
    return line;
  }));
  table.page = found.page;
  frame.querySelector("output").value = `page ${found.page + 1} of ${found.n_pages}, ${found.n_matching} of ${found.n_runs} runs`;
  at("previous").disabled = found.page === 0;
  at("next").disabled = found.page + 1 >= found.n_pages;
}

async function look() {
  try {
    const answer = await fetch("/status");
    if (!answer.ok) throw new Error(await answer.text());
    const status = await answer.json();
    showStatus(status);
    seen = Date.now();
    if (status.version !== version) {
      version = status.version;
      await showRuns();
      for (const figure of document.querySelectorAll("[data-figure]")) await showFigure(figure); // one after the other: drawing takes a core
      document.body.dataset.shown = Number(document.body.dataset.shown ?? 0) + 1;
    }
  } catch (error) {
    at("problem").textContent = `The server does not answer (${error.message}); trying again.`;
  }
  at("age").textContent = seen ? `as of ${new Date(seen).toLocaleTimeString()}` : "";
  setTimeout(look, LOOK);
}

at("previous").addEventListener("click", () => { table.page -= 1; showRuns(); });
at("next").addEventListener("click", () => { table.page += 1; showRuns(); });
document.querySelector("#table-runs input").addEventListener("input", (event) => {
  Object.assign(table, { filter: event.target.value, page: 0 });
  showRuns();
});
look();
