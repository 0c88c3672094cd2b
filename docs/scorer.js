// How Sphinx ranks what a search finds. By itself it puts every page first in whose headings a word stands. Here pages
// about a symptom come first, then pages whose title has a word of the query, and the reference last.
var Scorer = {
  symptoms: [
    [/\bnans?\b|\binf\b|not finite|nonfinite/, "diagnosis"],
    [/not (fall|learn|train|converge)|\bfalls?\b|stuck|flat/, "checkup"],
    [/\bport\b|differs?\b/, "diff"],
    [/overflow|underflow/, "ranges"],
    [/\bci\b/, "numerics"],
    [/spike/, "rules/spike-guard"],
  ],
  score: ([page, title, , , score, , kind]) => {
    const query = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase();
    if (Scorer.symptoms.some(([words, guide]) => guide === page && words.test(query))) score += 40;
    const words = query.split(/\W+/).filter((word) => word.length > 2).map((word) => word.replace(/s$/, ""));
    if (kind === "text" && words.some((word) => title.toLowerCase().includes(word))) score += 10;
    return page.startsWith("api/") ? score - 4 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
