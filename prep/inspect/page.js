"use strict";
// Tables whose class is "sortable": a click on a column's title sorts by it, again: the other way.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const shown = (row) => row.cells[column].textContent;
      const number = (row) => Number.parseFloat(shown(row).replaceAll(",", ""));
      const order = (one, other) => {
        const [a, b] = [number(one), number(other)];
        // Cells without a number, such as dashes, come last in either order.
        if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1;
        const found = Number.isNaN(a) ? shown(one).localeCompare(shown(other)) : a - b;
        return down ? -found : found;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}
