// A table that is cut off says that it scrolls.
const showHints = () => {
  for (const box of document.querySelectorAll(".scroll")) {
    const isCut = box.scrollWidth > box.clientWidth + 1, hint = box.previousElementSibling;
    if (hint && hint.classList.contains("hint")) hint.hidden = !isCut;
    else if (isCut) box.insertAdjacentHTML("beforebegin", '<p class="quiet hint">scroll the table sideways →</p>');
  }
};
addEventListener("resize", showHints);
addEventListener("toggle", showHints, true);
showHints();
// Clicking a heading sorts its table; in a numeric column, rows that are not compared or lack the figure stay last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), body = button.closest("table").tBodies[0], column = heading.cellIndex;
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const numeric = heading.classList.contains("num");
    const key = (row) => numeric ? row.cells[column].dataset.value : row.cells[column].textContent;
    const compare = (a, b) => numeric ? a - b : a.localeCompare(b);
    const known = (row) => !numeric || (key(row) !== undefined && !row.classList.contains("out"));
    const rows = [...body.rows];
    const sorted = rows.filter(known).sort((a, b) => compare(key(a), key(b)) * (up ? 1 : -1));
    body.append(...sorted, ...rows.filter((row) => !known(row)));
  });
}
