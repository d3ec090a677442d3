// Light and dark, tables, and commands to copy.
"use strict";

const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const redraws = []; // of timelines, whose colours are those of the theme

function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  redraws.forEach((redraw) => redraw());
}

document.getElementById("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  setTheme(isDark ? "light" : "dark");
});
dark.addEventListener("change", () => setTheme(root.dataset.theme));

let shownTheme;
addEventListener("beforeprint", () => {
  shownTheme = root.dataset.theme;
  setTheme("light");
});
addEventListener("afterprint", () => setTheme(shownTheme));

// A click on a header sorts up, the next one down, the third restores the order.

const NEXT = { null: "ascending", ascending: "descending", descending: null };

function value(cell) {
  const { number } = cell.dataset;
  return number === undefined ? cell.textContent.trim() : Number(number);
}

function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === ""); // empty cells are last either way
  if (typeof a !== typeof b) return sign * (typeof a === "number" ? -1 : 1);
  return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
}

function sortable(table) {
  const headers = [...table.querySelectorAll("th")];
  const groups = [...table.tBodies].map((body) => [body, [...body.rows]]);

  function sort(column) {
    const next = NEXT[headers[column].getAttribute("aria-sort")];
    headers.forEach((header) => header.removeAttribute("aria-sort"));
    table.classList.toggle("sorted", next !== null);
    groups.forEach(([body, rows]) => body.append(...rows));
    if (next === null) return;
    headers[column].setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const keyed = groups.flatMap(([, rows]) => rows).map((row) => [value(row.cells[column]), row]);
    keyed.sort(([a], [b]) => compare(a, b, sign));
    groups[0][0].append(...keyed.map(([, row]) => row));
  }

  headers.forEach((header, column) => {
    header.firstElementChild.addEventListener("click", () => sort(column));
  });
}

document.querySelectorAll("table:not(.plain)").forEach(sortable);

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}
