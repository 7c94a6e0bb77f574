"use strict";
// Tables whose class is "sortable": a click on a column's title sorts by it, again: the other way.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const shown = (row) => row.cells[column].textContent;
      const number = (row) => Number.parseFloat(shown(row).replaceAll(",", ""));
      const order = (one, other) => {
        const [a, b] = [number(one), number(other)];
        // Cells without a number, such as dashes, come last in either order.
        if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1;
        const found = Number.isNaN(a) ? shown(one).localeCompare(shown(other)) : a - b;
        return down ? -found : found;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}
// Draws the samples of the page's data, and filters them. Texts of the data only ever become text nodes.
if (document.getElementById("samples")) {
  const { classes, samples } = JSON.parse(document.getElementById("samples").textContent);
  const find = (id) => document.getElementById(id);
  const add = (parent, tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const drawBoxes = (parent, boxes) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 1 1");
    svg.setAttribute("preserveAspectRatio", "none");
    for (const [left, top, right, bottom] of boxes) {
      const rect = document.createElementNS(space, "rect");
      const place = { x: left, y: top, width: Math.max(0, right - left), height: Math.max(0, bottom - top) };
      for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
      rect.setAttribute("vector-effect", "non-scaling-stroke");
      svg.append(rect);
    }
    parent.append(svg);
  };
  const picture = (parent, source, name, text) => {
    const made = add(parent, "img", name);
    made.src = source;
    made.alt = text;
    made.decoding = "async";
  };
  const cards = samples.map((sample) => {
    const card = add(find("cards"), "div", "card");
    const photo = add(card, "div", "photo");
    if (sample.photo) picture(photo, sample.photo, "", sample.key);
    else add(photo, "div", "none", sample.bad ? "cannot be decoded" : "no photo");
    if (sample.mask) picture(photo, sample.mask, "mask", "");
    if (sample.boxes.length) drawBoxes(photo, sample.boxes);
    if (sample.class !== null) {
      const [name, label] = classes[sample.class];
      add(card, "div", "label", name === label ? name : `${name} (${label})`);
    }
    add(card, "div", "key", sample.key).title = `${sample.key} in ${sample.shard}`;
    if (sample.photo) add(card, "div", "soft", `${sample.size[1]} x ${sample.size[0]}`);
    if (sample.caption) add(card, "div", "caption", sample.caption);
    if (sample.bad) add(card, "div", "bad", sample.bad);
    return card;
  });
  for (const [name, label] of classes) {
    add(find("class"), "option", "", name === label ? name : `${name} (${label})`).value = label;
  }
  const findings = [...document.querySelectorAll("#findings tbody tr")];
  const filter = () => {
    const [key, label, onlyBad] = [find("key").value, find("class").value, find("only-bad").checked];
    let shown = 0;
    samples.forEach((sample, number) => {
      const isOfClass = !label || (sample.class !== null && classes[sample.class][1] === label);
      const isShown = sample.key.includes(key) && isOfClass && (!onlyBad || sample.bad !== "");
      cards[number].hidden = !isShown;
      shown += isShown;
    });
    for (const row of findings) row.hidden = !row.cells[0].textContent.includes(key);
    find("count").textContent = `${shown} of ${samples.length} shown`;
    find("cards").classList.toggle("no-masks", !find("with-mask").checked);
    find("cards").classList.toggle("no-boxes", !find("with-boxes").checked);
  };
  find("filters").addEventListener("input", filter);
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  for (const { cells: [name, id] } of document.querySelectorAll("#classes tbody tr")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "class";
    button.dataset.class = id.textContent;
    button.append(...name.childNodes);
    name.append(button);
    button.addEventListener("click", () => {
      const option = [...find("class").options].find((one) => one.value === button.dataset.class);
      if (!option) {
        // None of the samples on this page has the class: the count says so.
        add(find("class"), "option", "", button.textContent).value = button.dataset.class;
      }
      find("class").value = button.dataset.class;
      filter();
      find("filters").scrollIntoView();
    });
  }
  filter();
}
