/* A page that `report --watch` loads again stands as it stood: its place and that of tables, the focus, filters, order and
   opened parts, which the history keeps for it. */
const all = (selector) => [...document.querySelectorAll(selector)];
const focusable = () => all("a, button, input, summary, [tabindex]");
const kept = () => ({
  place: [scrollX, scrollY],
  scrolls: all(".scroll").map((one) => [one.parentElement.id, one.scrollLeft, one.scrollTop]),
  open: all("details").map((one, i) => (one.open ? i : -1)),
  focus: focusable().indexOf(document.activeElement),
  selection: document.activeElement?.selectionStart ?? null,
  tables: [...tables].map(([id, { filter, heads, more }]) => {
    const column = heads.findIndex((head) => head.ariaSort);
    return { id, text: filter?.value ?? "", name: heads[column]?.textContent, ascending: heads[column]?.ariaSort === "ascending",
      whole: more.ariaExpanded === "true" };
  }),
});
const state = history.state?.page;
if (state) {
  for (const { id, text, name, ascending, whole } of state.tables) {
    const table = tables.get(id);
    if (!table) continue;
    if (whole) table.more.click();
    const column = table.heads.findIndex((head) => head.textContent === name);
    if (column >= 0) table.sort(column, ascending);
    if (text) { table.filter.value = text; table.show(); }
  }
  all("details").forEach((one, i) => { one.open = state.open.includes(i); });
  all(".scroll").forEach((one, i) => { one.scrollTo(...(state.scrolls[i]?.slice(1) ?? [0, 0])); });
  const focused = focusable()[state.focus];
  focused?.focus({ preventScroll: true });
  if (focused && state.selection !== null) focused.setSelectionRange?.(state.selection, state.selection);
  scrollTo({ left: state.place[0], top: state.place[1], behavior: "instant" });
  history.replaceState(null, "");
}
