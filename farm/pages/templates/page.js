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

  for (const table of document.querySelectorAll("table.sorted")) {
    const rows = [...table.tBodies[0].rows];
    const heads = [...table.tHead.rows[0].cells];
    const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
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
      table.tBodies[0].append(...rows);
    }));
    const search = document.getElementById(table.dataset.search);
    const found = document.getElementById(`${table.dataset.search}-found`);
    const texts = rows.map((row) => row.textContent.toLowerCase());
    search?.addEventListener("input", () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => texts[index].includes(word));
        shown += !row.hidden;
      });
      found.textContent = `${shown} of ${rows.length} rows`;
    });
  }
})();
