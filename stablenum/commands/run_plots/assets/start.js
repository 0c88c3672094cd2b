for (const plot of PLOTS) frame(plot); // first all places: side by side, each has a part of the width
for (const plot of PLOTS) make(plot);
tell();

for (const box of PAGE.querySelectorAll(".legend input")) {
  box.addEventListener("change", () => {
    const r = Number(box.dataset.run);
    RUNS[r].shown = box.checked;
    for (const plot of PLOTS) {
      plot.lines.forEach((_, k) => plot.u.setSeries(1 + k * RUNS.length + r, { show: box.checked }));
    }
  });
}

let width = ROOT.clientWidth;
new ResizeObserver(() => {
  if (ROOT.clientWidth === width) return;
  width = ROOT.clientWidth;
  for (const plot of PLOTS) plot.u.setSize({ width: widthNow(plot), height: HEIGHT });
}).observe(ROOT);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  COLOURS.clear();
  for (const plot of PLOTS) plot.u.redraw(false);
});
requestAnimationFrame(() => setTimeout(() => performance.mark("interactive")));
