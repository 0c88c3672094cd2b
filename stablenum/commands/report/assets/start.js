for (const plot of PLOTS) {
  frame(plot);
  make(plot);
}
tell();

for (const box of document.querySelectorAll("#legend input")) {
  box.addEventListener("change", () => {
    const r = Number(box.dataset.run);
    RUNS[r].shown = box.checked;
    for (const plot of PLOTS) {
      plot.lines.forEach((_, k) => plot.u.setSeries(1 + k * RUNS.length + r, { show: box.checked }));
    }
  });
}

let width = widthNow();
new ResizeObserver(() => {
  if (widthNow() === width) return;
  width = widthNow();
  for (const plot of PLOTS) plot.u.setSize({ width, height: HEIGHT });
}).observe(ROOT);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  COLOURS.clear();
  for (const plot of PLOTS) plot.u.redraw(false);
});
requestAnimationFrame(() => setTimeout(() => performance.mark("interactive")));
