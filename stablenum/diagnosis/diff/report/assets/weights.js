// The filter of the table of weights.

function startWeights() {
  const input = document.getElementById("weights-filter");
  const all = [...document.querySelectorAll("#weights tbody tr")];
  input.addEventListener("input", () => {
    const text = input.value.trim().toLowerCase();
    let number = 0;
    for (const row of all) {
      row.hidden = !row.textContent.toLowerCase().includes(text);
      number += row.hidden ? 0 : 1;
    }
    const count = document.getElementById("weights-count");
    count.textContent = text ? `${counted(number)} of ${counted(all.length)}` : "";
  });
}
