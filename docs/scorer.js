// How Sphinx ranks what a search finds. Its own numbers put the page first in whose headings a word stands; a search
// for what goes wrong is to lead to the guides that say what to do, before the reference.
var Scorer = {
  guides: {
    diagnosis: 25, checkup: 20, faq: 12, diff: 12, numerics: 12, precision: 12, ranges: 12, recover: 12, pytorch: 8,
    jax: 8, verify: 8, index: -5,
  },
  score: ([page, , , , score]) => score + (Scorer.guides[page] ?? (page.startsWith("api/") ? -4 : 0)),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
