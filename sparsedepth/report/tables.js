"use strict";
/* Tables sort by a click (or Enter) on a column's name; a filter shows the rows that have all its words and meet all its
   conditions on a column (n_layers=12, val_loss<1.3); `keep` those that a figure marks. The columns of a long table keep
   the widths that they have when it is first sorted, so that rows out of view need no layout. Of a table that is wider
   than the window the columns that fit are shown; a button shows the others. */
const tables = new Map(), LONG = 100, cuts = new Set();
for (const frame of document.querySelectorAll("[data-table]")) {
  const table = frame.querySelector("table");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const names = heads.map((head) => head.textContent.trim());
  const collator = new Intl.Collator(undefined, { numeric: true });
  const rows = [...body.rows].map((row) => ({
    row,
    cells: [...row.cells].map(({ dataset: { key, unit } }) => ({ key, number: Number(key), unit: unit ?? "" })),
    text: row.textContent.toLowerCase(),
    id: row.cells[0].textContent,
  }));
  const compare = (column, numeric, sign) => (one, other) => {
    const a = one.cells[column], b = other.cells[column];
    if (a.key === "" || b.key === "") return (a.key === "") - (b.key === ""); // missing values come last in both directions
    if (!numeric) return sign * collator.compare(a.key, b.key);
    return a.unit === b.unit ? sign * (a.number - b.number) : a.unit < b.unit ? -1 : 1;
  };
  const sort = (column, ascending) => {
    if (rows.length > LONG && heads[0].offsetWidth && !frame.classList.contains("fixed")) {
      frame.style.setProperty("--columns", heads.map((head) => `${head.getBoundingClientRect().width}px`).join(" "));
      frame.classList.add("fixed");
    }
    heads.forEach((head, i) => i === column || head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    rows.sort(compare(column, heads[column].classList.contains("number"), ascending ? 1 : -1));
    body.replaceChildren(...rows.map(({ row }) => row));
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      sort(column, head.getAttribute("aria-sort") !== "ascending");
    });
  });

  const scroller = table.parentElement, more = document.createElement("button");
  Object.assign(more, { type: "button", className: "more", hidden: true, ariaExpanded: "false" });
  scroller.before(more);
  frame.dataset.cut = heads.length;
  let ends; // of the columns, before any is hidden
  const fit = () => {
    ends ??= heads.map((head) => head.getBoundingClientRect().right - table.getBoundingClientRect().left);
    const isWhole = more.ariaExpanded === "true";
    const n = isWhole ? heads.length : Math.max(2, ends.filter((end) => end < scroller.clientWidth + 1).length);
    more.hidden = ends.at(-1) < scroller.clientWidth + 1;
    more.textContent = isWhole ? "fewer columns" : `${heads.length - n} more columns`;
    if (frame.dataset.cut === `${n}`) return;
    frame.dataset.cut = n;
    frame.classList.remove("fixed");
    if (cuts.has(n)) return;
    cuts.add(n);
    document.styleSheets[0].insertRule(`@media screen { [data-cut="${n}"] tr > :nth-child(n + ${n + 1}) { display: none; } }`);
  };
  more.addEventListener("click", () => { more.ariaExpanded = `${more.ariaExpanded !== "true"}`; fit(); });
  if (!frame.classList.contains("stacked")) new ResizeObserver(fit).observe(scroller);

  const filter = frame.querySelector("input");
  const shown = frame.querySelector("output");
  const meets = { "=": (x, y) => x === y, "!=": (x, y) => x !== y, "<": (x, y) => x < y, "<=": (x, y) => x <= y,
    ">": (x, y) => x > y, ">=": (x, y) => x >= y };
  const condition = (word) => {
    const [, name, sign, value] = word.match(/^(\w+)(!=|<=|>=|=|<|>)(.+)$/) ?? [];
    const column = names.findIndex((one) => one.toLowerCase() === name);
    if (column < 0) return ({ text }) => text.includes(word);
    return ({ cells: { [column]: { key, number } } }) => key !== "" && (Number.isNaN(Number(value)) || Number.isNaN(number)
      ? meets[sign](key.toLowerCase(), value) : meets[sign](number, Number(value)));
  };
  let marked = null;
  const show = () => {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
    let count = 0;
    for (const each of rows) {
      const isShown = wanted.every((meet) => meet(each)) && (!marked || marked.has(each.id));
      each.row.hidden = !isShown;
      count += isShown;
    }
    shown.value = `${count} of ${rows.length}${marked ? ", marked in a figure" : ""}`;
  };
  filter?.addEventListener("input", show);
  tables.set(frame.id || `table-${tables.size}`, { sort, filter, show, heads, more, keep: (ids) => { marked = ids; show(); } });
}
