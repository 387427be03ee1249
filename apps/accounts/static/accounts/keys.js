// The page with a new key answers a POST: loaded again it would make another one, so the history says GET.
if (document.querySelector("[data-copy]")) history.replaceState(null, "", location.href);

// Copies a new key to the clipboard. Without a clipboard (plain http) the button stays hidden.
for (const button of document.querySelectorAll("[data-copy]")) {
  const field = document.getElementById(button.dataset.copy);
  field.select();
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(field.value);
    button.textContent = "Copied";
  });
}
