"use strict";
// Sort and filter the tables of the page. Everything else works without this script.
for (const section of document.querySelectorAll("[data-table]")) {
  const table = section.querySelector("table");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const headers = Array.from(table.tHead.rows[0].cells);

  // A cell with a number has it in data-v; a cell without a value has none, and comes last.
  const valueOf = (row, column, numeric) => {
    const cell = row.cells[column];
    if (!numeric) return cell.textContent;
    return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
  };

  const sort = (column, descending) => {
    const numeric = headers[column].dataset.sort === "number";
    const keyed = rows.map((row) => [valueOf(row, column, numeric), row]);
    const compare = numeric
      ? (a, b) => (a < b ? -1 : a > b ? 1 : 0)
      : (a, b) => a.localeCompare(b, "en", { numeric: true });
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return descending ? compare(b, a) : compare(a, b);
    });
    body.append(...keyed.map(([, row]) => row));
    headers.forEach((header, i) => {
      if (i !== column) header.removeAttribute("aria-sort");
      else header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    });
  };

  headers.forEach((header, column) => {
    const button = header.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      sort(column, header.getAttribute("aria-sort") === "ascending");
    });
  });

  const text = section.querySelector("input");
  const choice = section.querySelector("select");
  const status = section.querySelector("[role=status]");
  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const name = row.cells[0].textContent.toLowerCase();
      const kind = row.dataset.kind;
      const right = !choice.value || kind === choice.value || (choice.value === "*" && kind !== "plain");
      row.hidden = !(right && words.every((word) => name.includes(word)));
      shown += !row.hidden;
    }
    status.textContent = `${shown} of ${rows.length} rows`;
  };
  text.addEventListener("input", filter);
  choice.addEventListener("change", filter);
  filter();

  // A link of the heat map leads to a row, which must be visible.
  const reveal = () => {
    const row = rows.find((r) => r.id && r.id === location.hash.slice(1));
    if (row && row.hidden) {
      text.value = "";
      choice.value = "";
      filter();
      row.scrollIntoView();
    }
  };
  window.addEventListener("hashchange", reveal);
}
