"use strict";
// A line at the pointer's place, and below the timeline what each stage did then.
{
  const timelines = JSON.parse(document.getElementById("timelines").textContent);
  for (const box of document.querySelectorAll(".timeline")) {
    const { seconds, rows } = timelines[Number(box.dataset.number)];
    const [cursor, track, readout] = [box.querySelector(".cursor"), box.querySelector(".track"), box.nextElementSibling];
    const told = (row, place) => {
      const busy = row.threads > 1 ? `${((row.busy[place] * row.threads) / 100).toFixed(1)} of ${row.threads}` : `${row.busy[place]} %`;
      return `${row.stage} ${busy}${row.waits[place] ? ` (waits ${row.waits[place]} %)` : ""}`;
    };
    box.addEventListener("pointermove", (event) => {
      const [edges, outer] = [track.getBoundingClientRect(), box.getBoundingClientRect()];
      const share = (event.clientX - edges.left) / edges.width;
      cursor.hidden = share < 0 || share >= 1;
      if (cursor.hidden) return;
      cursor.style.left = `${event.clientX - outer.left}px`;
      const place = Math.floor(share * rows[0].busy.length);
      readout.textContent = `${(share * seconds).toFixed(3)} s: ${rows.map((row) => told(row, place)).join(" · ")}`;
    });
    box.addEventListener("pointerleave", () => {
      cursor.hidden = true;
    });
  }
}
