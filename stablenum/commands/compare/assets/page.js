// The plots of a scenario are drawn when it comes near the screen: all of them together would take seconds.

const { scenarios, reasons } = JSON.parse(document.getElementById("data").textContent);
const SECTIONS = [...document.querySelectorAll("section.scenario")];
const waiting = new Set(SECTIONS);

function draw(section) {
  if (!waiting.delete(section)) return;
  watcher.unobserve(section);
  drawRuns({ runs: scenarios[SECTIONS.indexOf(section)], reasons }, section);
}

const watcher = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
  { rootMargin: "600px" },
);
for (const section of SECTIONS) watcher.observe(section);
addEventListener("beforeprint", () => SECTIONS.forEach(draw));
