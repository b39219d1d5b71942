"use strict";
(() => {
  const root = document.documentElement;
  const plotly = globalThis.Plotly || globalThis.moduleName;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const boxes = [...document.querySelectorAll("[data-chart]")];
  const quiet = { displayModeBar: false, responsive: true };

  // Colours are named in the figures and looked up here: one figure for light, dark and paper.
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const colour = (value) => {
    probe.style.color = value;
    return getComputedStyle(probe).color;
  };
  const resolved = (value) => {
    if (typeof value === "string") return value.startsWith("var(") ? colour(value) : value;
    if (Array.isArray(value)) return value.map(resolved);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item)]));
    }
    return value;
  };
  const draw = (box) => {
    const figure = resolved(figures[box.dataset.chart]);
    return plotly.react(box, figure.data, figure.layout, quiet);
  };
  const drawAll = () => { if (plotly) boxes.forEach(draw); };

  // The theme, kept where the browser lets a file keep anything.
  const kept = (change) => {
    try { return change(localStorage); } catch { return null; }
  };
  const theme = document.getElementById("theme");
  const dress = (name) => {
    if (name) root.dataset.theme = name; else delete root.dataset.theme;
    drawAll();
  };
  theme.value = kept((store) => store.getItem("sm121-theme")) || "";
  if (theme.selectedIndex < 0) theme.value = "";
  theme.parentElement.hidden = false;
  theme.addEventListener("change", () => {
    kept((store) => store.setItem("sm121-theme", theme.value));
    dress(theme.value);
  });
  dress(theme.value);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  // What can be copied has a button for it.
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.body.appendChild(document.createElement("textarea"));
      area.value = text;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  const button = (word, what, text) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "copy";
    made.textContent = word;
    made.setAttribute("aria-label", `${word} ${what}`);
    made.addEventListener("click", async () => {
      await copy(text);
      made.textContent = "copied";
      setTimeout(() => { made.textContent = word; }, 1500);
    });
    return made;
  };
  document.querySelectorAll("pre.command").forEach((line, place) => {
    line.before(button("copy", `command ${place + 1}`, line.textContent));
  });

  // The table of every test: filters, and what of a line can be copied.
  const rows = [...document.querySelectorAll("#every-test tbody tr")];
  const said = new Map(rows.map((row) => [row, {
    text: row.textContent.toLowerCase(),
    level: row.dataset.level.toLowerCase(),
    verdict: row.querySelector(".chip").textContent.toLowerCase(),
    severity: row.dataset.severity || "blocker",
  }]));
  const filters = [...document.querySelectorAll("[data-filter]")];
  const shown = document.getElementById("shown");
  const furnish = () => {
    for (const row of rows) {
      const link = row.querySelector(".here");
      const id = link.textContent;
      link.after(" ", button("copy id", `of ${id}`, id));
      if (row.dataset.again) link.nextElementSibling.after(" ", button("copy command", `of ${id}`, row.dataset.again));
    }
  };
  const tabs = [...document.querySelectorAll("[data-show-verdict]")];
  let verdict = "";
  const sift = () => {
    const wanted = filters.map((one) => [one.dataset.filter, one.value.trim().toLowerCase()]);
    wanted.push(["verdict", verdict.toLowerCase()]);
    for (const tab of tabs) {
      if (tab.dataset.showVerdict === verdict) tab.setAttribute("aria-current", "true");
      else tab.removeAttribute("aria-current");
    }
    const fits = (row) => wanted.every(([what, value]) => !value
      || (what === "text" ? said.get(row).text.includes(value) : said.get(row)[what] === value));
    let count = 0;
    for (const row of rows) {
      row.hidden = !fits(row);
      count += !row.hidden;
    }
    shown.textContent = `${count} of ${rows.length} tests`;
  };
  const unfilter = () => {
    filters.forEach((one) => { one.value = ""; });
    verdict = "";
    sift();
  };
  if (rows.length) {
    furnish();
    document.querySelector(".filter").hidden = false;
    filters.forEach((one) => one.addEventListener("input", sift));
    document.getElementById("unfilter").addEventListener("click", unfilter);
    document.querySelectorAll("[data-show-level]").forEach((link) => link.addEventListener("click", () => {
      unfilter();
      filters.find((one) => one.dataset.filter === "level").value = link.dataset.showLevel;
      sift();
      document.querySelector("#tests details").open = true;
    }));
    tabs.forEach((tab) => tab.addEventListener("click", () => {
      if (tab.closest("header")) unfilter(); // its counts are of all tests
      verdict = tab.dataset.showVerdict;
      sift();
      document.querySelector("#tests details").open = true;
    }));
    sift();
  }

  // What is folded on the screen is open on paper, and what a link leads to is open on the screen.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details[data-print]:not([open])")];
    opened.forEach((item) => { item.open = true; });
    dress("light");
  });
  addEventListener("afterprint", () => {
    opened.forEach((item) => { item.open = false; });
    dress(theme.value);
  });
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.hidden) unfilter();
    for (let item = target; item; item = item.parentElement) if (item.tagName === "DETAILS") item.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
  root.dataset.ready = "yes";
})();
