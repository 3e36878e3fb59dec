// Draws the charts, and draws them again in the other colours when the theme changes.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const probe = document.body.appendChild(Object.assign(document.createElement("span"), { hidden: true }));

  // plotly wants plain colours: put in what each CSS variable is worth in the current theme.
  const colour = (value) => { probe.style.color = value; return getComputedStyle(probe).color; };
  const resolve = (value) =>
    typeof value === "string" ? (value.startsWith("var(--") ? colour(value) : value)
    : Array.isArray(value) ? value.map(resolve)
    : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner)]))
    : value;

  const charts = [...document.querySelectorAll("script[data-chart]")].map((script) => ({
    place: document.getElementById(script.dataset.chart),
    figure: JSON.parse(script.textContent),
  }));
  const config = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };
  const draw = () => {
    for (const { place, figure } of charts) {
      const { data, layout } = resolve(figure);
      Plotly.react(place, data, layout, config);
    }
  };

  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const button = document.getElementById("theme");
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("draftsmith-theme", root.dataset.theme); } catch { /* no storage in a sandboxed frame */ }
    label();
    draw();
  });
  system.addEventListener("change", () => { label(); draw(); });
  // Paper is white, whatever the screen is.
  let before, closed = [];
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    // What is folded away would not be printed.
    closed = [...document.querySelectorAll("details.sample:not([open])")];
    for (const each of closed) each.open = true;
    draw();
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    for (const each of closed) each.open = false;
    draw();
  });
  label();
  draw();
})();
