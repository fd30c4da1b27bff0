"use strict";
/* Tables sort by a click (or Enter) on a column's name; a filter shows the rows that contain all its words. */
for (const frame of document.querySelectorAll("[data-table]")) {
  const table = frame.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];

  const compare = (column, numeric, sign) => (a, b) => {
    const x = a.cells[column].dataset.key, y = b.cells[column].dataset.key;
    if (x === "" || y === "") return (x === "") - (y === ""); // missing values come last in both directions
    return sign * (numeric ? x - y : x.localeCompare(y, undefined, { numeric: true }));
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      rows.sort(compare(column, head.classList.contains("number"), ascending ? 1 : -1));
      body.append(...rows);
    });
  });

  const filter = frame.querySelector("input");
  if (!filter) continue;
  const texts = new Map(rows.map((row) => [row, [...row.cells].map((c) => c.textContent).join("\n").toLowerCase()]));
  const shown = frame.querySelector("output");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    let count = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => texts.get(row).includes(word));
      count += !row.hidden;
    }
    shown.value = `${count} of ${rows.length}`;
  });
}
