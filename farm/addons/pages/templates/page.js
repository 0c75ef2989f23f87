"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const themed = (layout) => {
    const ink = colour("ink"), grid = colour("grid"), line = colour("line");
    const axis = { gridcolor: grid, zerolinecolor: line, linecolor: line, tickcolor: line };
    const set = (own) => ({ ...axis, ...own, title: { ...own.title, font: { size: 13 } } });
    return {
      ...layout,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 13, color: ink },
      hoverlabel: { align: "left", font: { size: 13 } },
      dragmode: false,
      ...(layout.xaxis && { xaxis: set(layout.xaxis) }),
      ...(layout.yaxis && { yaxis: set(layout.yaxis) }),
    };
  };
  const charts = [...document.querySelectorAll(".chart")].map((place) => {
    const chart = JSON.parse(place.nextElementSibling.textContent);
    const config = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false };
    Plotly.newPlot(place, chart.data, themed(chart.layout), config);
    place.on("plotly_click", (event) => {
      const link = event.points[0].customdata;
      if (typeof link === "string" && /^(#[\w-]+|[\w-]+\.html)$/.test(link)) window.location.href = link;
    });
    return [place, chart];
  });
  const redraw = (more) => {
    for (const [place, chart] of charts) Plotly.react(place, chart.data, { ...themed(chart.layout), ...more });
  };
  dark.addEventListener("change", () => redraw({}));
  window.addEventListener("beforeprint", () => redraw({ autosize: false, width: 660, font: { size: 12, color: "#1b1f24" } }));
  window.addEventListener("afterprint", () => redraw({}));

  // The contents of a long page, or of each article of it, below its heading.
  const articles = [...document.querySelectorAll("article")];
  const parts = articles.length ? articles : [...document.querySelectorAll("main")];
  parts.forEach((part, number) => {
    const sections = [...part.querySelectorAll("h2")];
    const heading = part.querySelector("h1");
    if (!heading || sections.length < 4) return;
    const contents = document.createElement("nav");
    contents.className = "contents";
    contents.ariaLabel = "Contents";
    sections.forEach((section, place) => {
      section.id ||= `section-${number + 1}-${place + 1}`;
      const link = document.createElement("a");
      link.href = `#${section.id}`;
      link.textContent = section.textContent;
      contents.append(link);
    });
    heading.after(contents);
  });

  for (const part of document.querySelectorAll(".rows")) {
    const body = part.querySelector("tbody");
    const heads = [...part.querySelector("thead").lastElementChild.cells];
    const rows = [...body.rows];
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const size = Number(part.dataset.size);
    const [search, found, previous, next] = ["input", ".found", ".previous", ".next"].map((name) => part.querySelector(name));
    const selects = [...part.querySelectorAll("select")];
    let first = 0;
    const show = (from) => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const matching = rows.filter((row) => words.every((word) => texts.get(row).includes(word))
        && selects.every((select) => !select.value || row.dataset[select.name] === select.value));
      first = from;
      const last = Math.min(first + size, matching.length);
      body.replaceChildren(...matching.slice(first, last));
      previous.disabled = first === 0;
      next.disabled = last === matching.length;
      previous.hidden = next.hidden = matching.length <= size;
      const of = matching.length === rows.length ? "" : ` (of ${rows.length})`;
      found.textContent = matching.length > size ? `${first + 1} to ${last} of ${matching.length} rows${of}` : `${matching.length} rows${of}`;
    };
    const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
      const numeric = head.classList.contains("n");
      const up = head.ariaSort ? head.ariaSort === "descending" : !numeric;
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = up ? "ascending" : "descending";
      const sign = up ? 1 : -1;
      const missing = (text) => numeric && text === "";
      rows.sort((a, b) => {
        const [left, right] = [value(a, column), value(b, column)];
        if (missing(left) || missing(right)) return missing(left) - missing(right);
        return sign * (numeric ? left - right : left.localeCompare(right, undefined, { numeric: true }));
      });
      show(0);
    }));
    for (const control of [search, ...selects]) control.addEventListener("input", () => show(0));
    previous.addEventListener("click", () => show(first - size));
    next.addEventListener("click", () => show(first + size));
    show(0);
  }
})();
