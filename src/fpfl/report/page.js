// Draws the charts, shows and hides groups in all of a run's charts at once, and follows the colour scheme.
(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const hidden = {};  // by run: which groups are hidden, and whether single rounds are
  const drawn = new Set();

  const dark = () => root.dataset.scheme === "dark" || (root.dataset.scheme === "auto" && prefersDark.matches);
  const colours = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { "@ink": of("--ink"), "@muted": of("--muted"), "@limit": of("--bad"), "@blue": of("--blue"), rule: of("--rule"),
             raised: of("--raised") };
  };
  const resolved = (value, table) => {
    if (typeof value === "string") return value[0] === "@" && table[value] || value;
    if (Array.isArray(value)) return value.map((item) => resolved(item, table));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, table)]));
    return value;
  };
  const stateOf = (run) => hidden[run] || (hidden[run] = { groups: new Set(), raw: false });

  function traces(spec, table) {
    const state = stateOf(spec.run);
    return spec.data.map((trace) => {
      const meta = trace.meta || {};
      const off = (meta.group !== undefined && state.groups.has(meta.group)) || (meta.raw && state.raw);
      // Values and names are data, and stay as they are.
      const look = {};
      for (const part of ["line", "marker", "textfont", "error_x", "error_y"])
        if (trace[part]) look[part] = resolved(trace[part], table);
      return { ...trace, ...look, visible: off ? (meta.raw ? false : "legendonly") : true };
    });
  }

  function layout(spec, table, width) {
    const narrow = width < 420;
    const axis = { gridcolor: table.rule, linecolor: table["@muted"], zerolinecolor: table.rule, automargin: true,
                   tickcolor: table["@muted"], title: { standoff: 8 } };
    const own = { ...spec.layout };
    for (const name of ["shapes", "annotations"]) if (own[name]) own[name] = resolved(own[name], table);
    const merged = (given) => ({ ...axis, ...given, title: { ...axis.title, ...given.title } });
    return {
      ...own,
      xaxis: merged(spec.layout.xaxis), yaxis: merged(spec.layout.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", size: narrow ? 12 : 13,
              color: table["@ink"] },
      margin: { l: 52, r: 14, t: 8, b: 40 },
      hovermode: "closest", hoverlabel: { bgcolor: table.raised, font: { color: table["@ink"] }, namelength: -1 },
      dragmode: coarse ? false : "zoom",
      showlegend: spec.legend && !(narrow && spec.grouped),
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, font: { size: 12 } },
      uirevision: "kept", autosize: true,
    };
  }

  function draw(div) {
    const spec = specs[div.id];
    const table = colours();
    const first = !drawn.has(div.id);
    drawn.add(div.id);
    Plotly.react(div, traces(spec, table), layout(spec, table, div.clientWidth),
                 { responsive: false, displayModeBar: false, displaylogo: false });
    if (first) {
      div.on("plotly_legendclick", (event) => {
        const meta = event.data[event.curveNumber].meta || {};
        if (meta.group === undefined) return true;
        toggle(spec.run, meta.group);
        return false;
      });
      div.on("plotly_legenddoubleclick", () => false);
      let width = div.clientWidth;
      new ResizeObserver(() => {
        if (!div.clientWidth || div.clientWidth === width) return;
        width = div.clientWidth;
        draw(div);
      }).observe(div);
    }
  }

  const plots = (run) => [...document.querySelectorAll(".plot")].filter((div) => run === undefined ||
                                                                        specs[div.id].run === run);
  const redraw = (run) => plots(run).filter((div) => drawn.has(div.id)).forEach(draw);
  // A chart is drawn when it comes near the screen: a page of many runs has dozens of them.
  const near = new IntersectionObserver((entries) => entries.forEach(({ isIntersecting, target }) => {
    if (!isIntersecting) return;
    near.unobserve(target);
    if (!drawn.has(target.id)) draw(target);
  }), { rootMargin: "500px" });

  function buttons(run) {
    return [...document.querySelectorAll("button[data-run]")].filter((button) => button.dataset.run === run);
  }
  function show(run) {
    const state = stateOf(run);
    for (const button of buttons(run)) {
      if (button.dataset.group !== undefined)
        button.setAttribute("aria-pressed", String(!state.groups.has(button.dataset.group)));
      else if (button.dataset.raw !== undefined) button.setAttribute("aria-pressed", String(!state.raw));
    }
    redraw(run);
  }
  function toggle(run, group) {
    const groups = stateOf(run).groups;
    if (!groups.delete(group)) groups.add(group);
    show(run);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-run]");
    if (!button) return;
    const run = button.dataset.run, state = stateOf(run);
    if (button.dataset.group !== undefined) return toggle(run, button.dataset.group);
    if (button.dataset.raw !== undefined) state.raw = !state.raw;
    else if (button.dataset.all === "show") state.groups.clear();
    else buttons(run).forEach((other) => other.dataset.group !== undefined && state.groups.add(other.dataset.group));
    show(run);
  });

  const scheme = document.getElementById("scheme");
  const kept = () => { try { return localStorage.getItem("fpfl-scheme"); } catch { return null; } };
  function painted() {
    scheme.setAttribute("aria-pressed", String(dark()));
    redraw();
  }
  scheme.addEventListener("click", () => {
    root.dataset.scheme = dark() ? "light" : "dark";
    try { localStorage.setItem("fpfl-scheme", root.dataset.scheme); } catch { /* private windows have none */ }
    painted();
  });
  if (kept() === "dark" || kept() === "light") root.dataset.scheme = kept();
  prefersDark.addEventListener("change", painted);

  function follow() {  // a link to a run opens it
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.matches("details")) target.open = true;
  }
  window.addEventListener("hashchange", follow);
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details.run").forEach((details) => { details.open = true; });
    plots().filter((div) => !drawn.has(div.id)).forEach(draw);
  });
  follow();
  painted();
  plots().forEach((div) => near.observe(div));
  root.dataset.ready = "yes";
})();
