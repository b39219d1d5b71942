"use strict";
(() => {
  const plotly = globalThis.Plotly || globalThis.moduleName;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const boxes = [...document.querySelectorAll("[data-chart]")];
  const quiet = { displayModeBar: false, responsive: true };

  // Colours are named in the figures and looked up here: one figure for light, dark and paper.
  const resolved = (value, style) => {
    if (typeof value === "string" && value.startsWith("var(")) {
      return style.getPropertyValue(value.slice(4, -1)).trim();
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, style)]));
    }
    return value;
  };
  const draw = (box) => {
    const figure = resolved(figures[box.dataset.chart], getComputedStyle(document.documentElement));
    return plotly.react(box, figure.data, figure.layout, quiet);
  };
  const drawAll = () => boxes.forEach(draw);
  if (plotly) {
    drawAll();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  }

  // What is folded on the screen is open on paper, and what a link leads to is open on the screen.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details[data-print]:not([open])")];
    opened.forEach((item) => { item.open = true; });
    if (plotly) drawAll();
  });
  addEventListener("afterprint", () => {
    opened.forEach((item) => { item.open = false; });
    if (plotly) drawAll();
  });
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    for (let item = target; item; item = item.parentElement) if (item.tagName === "DETAILS") item.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
  document.documentElement.dataset.ready = "yes";
})();
