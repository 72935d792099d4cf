"use strict";
// Tables of class "sortable": a click, or Enter on the focused heading, sorts by its column; again turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    const label = heading.textContent;
    if (table.matches(".many") && column > 0) for (const row of body.rows) row.cells[column].dataset.label = label;
    button.append(...heading.childNodes);
    heading.append(button);
    const value = (row) => {
      const cell = row.cells[column], text = cell.dataset.value ?? cell.textContent.trim();
      const number = Number.parseFloat(text.replace(/\u2009/g, ""));
      return Number.isFinite(number) ? number : text;
    };
    const compare = (a, b) => {
      if (typeof a === "number" && typeof b === "number") return a - b;
      return a.localeCompare(b, undefined, { numeric: true });
    };
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row), row]);
      // What is no number stays below the numbers, whichever way they go.
      const kind = ([key]) => (typeof key === "number" ? 0 : 1);
      rows.sort((a, b) => kind(a) - kind(b) || (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

// What is wider than the screen scrolls, by keys too.
for (const area of document.querySelectorAll(".scroll")) {
  if (area.scrollWidth > area.clientWidth) area.tabIndex = 0;
}

// The value of what is under the pointer or reached by keys.
const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "status");
tip.hidden = true;
document.body.append(tip);
const showTip = (point, text) => {
  tip.textContent = text;
  tip.hidden = false;
  const box = point.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.min(box.left + 12, document.documentElement.clientWidth - own.width - 4);
  tip.style.left = `${Math.max(4, left) + window.scrollX}px`;
  tip.style.top = `${box.top - own.height - 6 + window.scrollY}px`;
};

// Maps of points that have titles: by the pointer or, with the map focused, by the arrow keys.
for (const chart of document.querySelectorAll("figure:not(.chart) > svg")) {
  const points = [...chart.querySelectorAll(".dot")].filter((point) => point.querySelector("title"));
  if (points.length === 0) continue;
  let at = -1;
  const leave = () => {
    points[at]?.classList.remove("here");
    tip.hidden = true;
  };
  const move = (to) => {
    leave();
    at = Math.max(0, Math.min(points.length - 1, to));
    points[at].classList.add("here");
    showTip(points[at], points[at].querySelector("title").textContent);
  };
  chart.tabIndex = 0;
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -points.length, End: points.length }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      move(at + step);
    }
    if (event.key === "Escape") leave();
  });
  chart.addEventListener("blur", leave);
  chart.addEventListener("pointerover", (event) => {
    const point = points.indexOf(event.target);
    if (point >= 0) move(point);
  });
  chart.addEventListener("pointerleave", leave);
}
