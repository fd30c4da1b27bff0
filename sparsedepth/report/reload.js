/* While `report --watch` runs: the page loads itself again, but not while it is being used, which loading would undo. */
{
  const { seconds, silent, written } = document.getElementById("progress").dataset;
  const isUsed = () =>
    document.querySelector("details[open], th[aria-sort]") !== null ||
    [...document.querySelectorAll("input")].some((input) => input.value !== "" || input === document.activeElement);
  const age = Date.now() / 1000 - written;
  if (age > silent) {
    document.getElementById("note").textContent =
      `Not written for ${Math.round(age / 60)} minutes: report --watch has ended, or takes long to draw.`;
  }
  setInterval(() => isUsed() || location.reload(), 1000 * seconds);
}
