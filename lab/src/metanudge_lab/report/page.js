"use strict";
// Sort a table by clicking (or pressing Enter on) a heading; once more turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order);
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
      const number = (text) => (text === "inf" ? Infinity : text === "" || isNaN(text) ? NaN : Number(text));
      const compare = (a, b) => {
        const [x, y] = [number(a), number(b)];
        if (!isNaN(x) && !isNaN(y)) return x < y ? -1 : x > y ? 1 : 0;
        if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
        return a.localeCompare(b, undefined, { numeric: true });
      };
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(key(a), key(b)));
      table.tBodies[0].append(...rows);
    });
  });
}
// On paper everything is unfolded.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
