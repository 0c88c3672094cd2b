// Offers the other versions of the documentation. The list lies beside the folders of the versions. Pages that were
// built and not published have no list, and ask for none.
document.addEventListener("DOMContentLoaded", async () => {
  const box = document.querySelector(".versions");
  if (!box?.dataset.list) return;
  const root = new URL(document.documentElement.dataset.content_root, document.baseURI);
  const list = new URL(box.dataset.list, root);
  if (list.protocol === "file:") return; // a browser loads nothing for a page that is read from a disk
  let versions;
  try {
    versions = await (await fetch(list)).json();
  } catch {
    return; // a copy that stands alone
  }
  const page = document.location.href.slice(root.href.length);
  const select = box.querySelector("select");
  for (const { version, path, latest } of versions) {
    const label = latest ? `${version} (latest)` : version;
    const here = version === box.dataset.version;
    const option = new Option(label, new URL(path, list).href, here, here);
    select.add(option);
  }
  select.addEventListener("change", async () => {
    // The same page, if that version has it.
    const same = new URL(page, select.value);
    const there = await fetch(same, { method: "HEAD" }).then((r) => r.ok, () => false);
    document.location.href = there ? same.href : select.value;
  });
  box.hidden = versions.length === 0;
});
