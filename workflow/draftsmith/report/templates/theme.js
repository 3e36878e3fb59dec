// Before anything is painted: a theme asked for in the address (?theme=dark), else one chosen before, else the system's.
(() => {
  let theme = new URLSearchParams(location.search).get("theme");
  try { theme ||= localStorage.getItem("draftsmith-theme"); } catch { /* no storage in a sandboxed frame */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
