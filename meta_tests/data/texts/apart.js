() => {
  const tiles = [...document.querySelectorAll('.tile')];
  const boxes = tiles.map((tile) => tile.getBoundingClientRect());
  const beside = (a, b) => a.right <= b.left || b.right <= a.left;
  const apart = (a, b) => beside(a, b) || a.bottom <= b.top || b.bottom <= a.top;
  return tiles.length > 2 && tiles.every((tile) => tile.scrollWidth <= tile.clientWidth)
    && boxes.every((a, i) => boxes.every((b, j) => i === j || apart(a, b))); }
