// Runs before the first paint, so that the page never flashes in the other theme.
(() => {
  const root = document.documentElement;
  const apply = (choice) => {
    if (choice === "light" || choice === "dark") root.dataset.theme = choice;
    else delete root.dataset.theme;
  };
  let stored = null;
  try {
    stored = localStorage.getItem("sluice-theme");
  } catch {
    // Storage may be switched off; the system's setting is used then.
  }
  apply(stored);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  document.addEventListener("DOMContentLoaded", () => {
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      const label = () => button.setAttribute("aria-label", isDark() ? "Use the light theme" : "Use the dark theme");
      label();
      button.hidden = false;
      button.addEventListener("click", () => {
        const next = isDark() ? "light" : "dark";
        // Back to the system's own choice where that is what was asked for.
        const choice = next === (dark.matches ? "dark" : "light") ? null : next;
        apply(choice);
        try {
          if (choice) localStorage.setItem("sluice-theme", choice);
          else localStorage.removeItem("sluice-theme");
        } catch {
          // As above.
        }
        label();
      });
    }
  });
})();
