/* Figures answer to the pointer, or to the arrow keys: the nearest point with its run, setting and values. Buttons switch
   groups (settings, depths) and kinds; a rectangle drawn with the pointer keeps its runs in the table of runs. */
const NEAR = 14, MOST_BUTTONS = 12;
const svgElement = (name, of, attributes) => {
  const made = of.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
for (const figure of document.querySelectorAll("figure")) {
  const source = figure.querySelector("script[type='application/json']");
  if (!source) continue;
  const { groups, kinds, points, n_left_out: nLeftOut } = JSON.parse(source.textContent);
  const svg = figure.querySelector("svg"), frame = svg.parentElement;
  const artists = [...svg.querySelectorAll("[data-mark]")].map((artist) => ({ artist, mark: artist.dataset.mark }));
  const marks = points.map(([x, y, group, kind, text, runs]) => (
    { x, y, group: groups[group], kind: kinds[kind], text, runs: runs ? runs.split(" ") : [] }));
  const isOfLines = groups[0].startsWith("proposal "); // a line for each
  const off = new Set();
  const isOn = ({ group, kind }) => !off.has(group) && !(kind && off.has(`:${kind}`));

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  frame.append(tip);
  const ring = svgElement("circle", svg, { r: 6, class: "ring", visibility: "hidden" });
  const toPage = ({ clientX, clientY }) => {
    const { a, d, e, f } = svg.getScreenCTM();
    return { x: (clientX - e) / a, y: (clientY - f) / d };
  };
  const tell = (mark) => {
    tip.hidden = !mark;
    ring.setAttribute("visibility", mark ? "visible" : "hidden");
    if (!mark) return;
    ring.setAttribute("cx", mark.x);
    ring.setAttribute("cy", mark.y);
    const runs = mark.runs.length > 3 ? [...mark.runs.slice(0, 3), `${mark.runs.length - 3} more`] : mark.runs;
    const named = [mark.group, mark.kind].filter(Boolean).join(", ");
    tip.textContent = `${named}; ${mark.text}${runs.length ? `; run ${runs.join(", ")}` : ""}`;
    const { a, d } = svg.getScreenCTM();
    const left = mark.x * a + 12;
    tip.style.left = `${Math.max(0, Math.min(left, frame.scrollLeft + frame.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, mark.y * d - tip.offsetHeight - 10)}px`;
  };
  const nearest = (at) => {
    let best = null, least = NEAR ** 2;
    for (const mark of marks) {
      const distance = (mark.x - at.x) ** 2 + (mark.y - at.y) ** 2;
      if (distance < least && isOn(mark)) [best, least] = [mark, distance];
    }
    return best;
  };

  const runsTable = tables.get("table-runs");
  const hasRuns = runsTable && marks.some(({ runs }) => runs.length);
  let start = null, brush = null;
  const choose = (within) => {
    const chosen = within && marks.filter((mark) => isOn(mark) && within(mark));
    const kept = chosen && new Set(chosen.flatMap(({ runs }) => runs));
    runsTable.keep(kept);
    const names = chosen && new Set(chosen.map(({ group }) => group));
    if (isOfLines) {
      for (const { artist, mark } of artists) artist.classList.toggle("dim", !!names && !names.has(mark.split("\u241f")[0]));
    }
    said.value = kept ? `${kept.size} run${kept.size === 1 ? "" : "s"} marked: the table of runs shows them (Escape: all)` : usual;
  };
  const clear = () => {
    brush?.remove();
    brush = null;
    if (hasRuns) choose(null);
  };
  svg.addEventListener("pointermove", (event) => {
    const at = toPage(event);
    if (!start) return tell(nearest(at));
    const [x, y] = [Math.min(at.x, start.x), Math.min(at.y, start.y)];
    const [width, height] = [Math.abs(at.x - start.x), Math.abs(at.y - start.y)];
    if (!brush && width + height < 6) return;
    brush ??= svgElement("rect", svg, { class: "brush" });
    for (const [key, value] of Object.entries({ x, y, width, height })) brush.setAttribute(key, value);
    choose((mark) => mark.x >= x && mark.x <= x + width && mark.y >= y && mark.y <= y + height);
  });
  svg.addEventListener("pointerleave", () => start || tell(null));
  if (hasRuns) {
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse") return; // a finger scrolls
      clear();
      start = toPage(event);
      svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    svg.addEventListener("pointerup", () => { start = null; });
  }
  let place = -1;
  frame.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { tell(null); clear(); }
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const shown = marks.filter(isOn);
    if (!step || !shown.length) return;
    event.preventDefault();
    place = (place + step + shown.length) % shown.length;
    tell(shown[place]);
  });

  const usual = `${hasRuns ? "Drag over points to mark their runs. " : ""}${nLeftOut ? `${nLeftOut} further points do not answer.` : ""}`;
  const bar = document.createElement("p");
  bar.className = "groups";
  const said = document.createElement("output");
  for (const [names, sign] of [[groups, ""], [kinds.filter(Boolean), ":"]]) {
    if (names.length < 2 || names.length > MOST_BUTTONS || isOfLines) continue;
    for (const name of names) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const key = `${sign}${name}`;
        if (!off.delete(key)) off.add(key);
        button.setAttribute("aria-pressed", String(!off.has(key)));
        for (const { artist, mark } of artists) {
          const [group, kind] = mark.split("\u241f");
          artist.classList.toggle("off", !isOn({ group, kind }));
        }
      });
      bar.append(button);
    }
  }
  said.value = usual;
  bar.append(said);
  frame.after(bar);
}
