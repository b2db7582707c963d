// Dark or light: the system's choice, until the person makes one.
import { byId } from "./dom.js";

const NAME = "sensorium.theme";

export function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (localStorage.getItem(NAME) ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light";
    byId("theme").querySelector("span").textContent = isDark() ? "Light" : "Dark";
  };
  byId("theme").addEventListener("click", () => {
    localStorage.setItem(NAME, isDark() ? "light" : "dark");
    show();
  });
  system.addEventListener("change", show);
  show();
}
