if (lines.length) {
  startFilters();
  startGrid();
  startPlot();
}
if (document.getElementById("weights")) startWeights();
performance.mark("interactive");
