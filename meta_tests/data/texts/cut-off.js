[...document.querySelectorAll('[data-chart]')].filter(c => c.offsetParent).flatMap(c => {
  const s = c.querySelector('svg').getBoundingClientRect();
  const texts = '.xtick text, .ytick text, .y2tick text, .xtitle, .ytitle, .y2title';
  return [...c.querySelectorAll(texts)].filter(t => {
    const b = t.getBoundingClientRect();  // plotly hides a number that has no room: no width
    return b.width && (b.left < s.left - 1 || b.right > s.right + 1 || b.bottom > s.bottom + 1);
  }).map(t => `${c.dataset.chart}: ${t.textContent}`);
})
