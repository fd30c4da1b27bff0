/* While `report --watch` runs: the page loads itself again. */
{
  const { seconds, silent, written } = document.getElementById("progress").dataset;
  const age = Date.now() / 1000 - written;
  if (age > silent) {
    document.getElementById("note").textContent =
      `Not written for ${Math.round(age / 60)} minutes: report --watch has ended, or takes long to draw.`;
  }
  setInterval(() => {
    history.replaceState({ page: kept() }, "");
    location.reload();
  }, 1000 * seconds);
}
