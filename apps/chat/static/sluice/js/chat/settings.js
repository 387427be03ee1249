/** A conversation's settings: the model picker in the bar, the dialog, and presets. */

import { call } from "./api.js";
import { $ } from "./dom.js";

// apps/chat/services.py keeps these names from users' own presets.
const BUILT_IN = [
  { name: "Default", settings: {} },
  { name: "Precise", settings: { temperature: 0 } },
  { name: "Balanced", settings: { temperature: 0.7, top_p: 0.95 } },
  { name: "Creative", settings: { temperature: 1.1, top_p: 0.98 } },
];
const NUMBERS = ["temperature", "top_p", "max_tokens"];

export class Settings {
  /** @param {object} hooks `changed(settings)` when the user has chosen others */
  constructor(presets, hooks) {
    this.presets = presets;
    this.hooks = hooks;
    this.values = {};
    this.models = [];
    this.fallback = null;
    this.dialog = $("settings");
    $("open-settings").addEventListener("click", () => this.open());
    $("apply-settings").addEventListener("click", () => this.apply());
    $("preset").addEventListener("change", () => this.choose());
    $("save-preset").addEventListener("click", () => this.savePreset());
    $("delete-preset").addEventListener("click", () => this.deletePreset());
    $("model").addEventListener("change", () => this.pick());
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target.matches("input") && !event.isComposing) {
        event.preventDefault();
        if (event.target.id === "preset-name") this.savePreset();
        else this.apply();
      }
    });
  }

  /** Show the settings of the conversation that has been opened. */
  show(values) {
    this.values = { ...values };
    this.drawModels();
  }

  setModels({ models, default: fallback }) {
    this.models = models;
    this.fallback = fallback;
    this.drawModels();
  }

  drawModels() {
    const select = $("model");
    const chosen = this.values.model ?? this.remembered() ?? this.fallback;
    const options = this.models.map((model) => {
      const option = new Option(model.ready ? model.alias : `not running: ${model.alias}`, model.alias);
      option.selected = model.alias === chosen;
      return option;
    });
    if (this.values.model && !this.models.some((model) => model.alias === this.values.model)) {
      options.push(new Option(`gone: ${this.values.model}`, this.values.model, true, true));
    }
    if (!options.length) options.push(new Option("No model yet", ""));
    select.replaceChildren(...options);
    $("empty-model").textContent = select.value || "the model";
  }

  pick() {
    this.values = { ...this.values, model: $("model").value };
    $("empty-model").textContent = $("model").value;
    try {
      localStorage.setItem("sluice-model", $("model").value);
    } catch {
      // Without storage the choice holds for this conversation.
    }
    this.hooks.changed(this.values);
  }

  remembered() {
    try {
      const alias = localStorage.getItem("sluice-model");
      return this.models.some((model) => model.alias === alias && model.ready) ? alias : null;
    } catch {
      return null;
    }
  }

  /** What a new conversation starts with. */
  forNew() {
    const model = $("model").value;
    return model ? { ...this.values, model } : { ...this.values };
  }

  open() {
    this.drawDefaults();
    this.fill(this.values);
    this.drawPresets();
    this.complain("");
    $("preset-name").value = "";
    this.dialog.showModal();
  }

  /** An empty field says what it stands for, with the model that is picked. */
  drawDefaults() {
    const model = this.models.find((each) => each.alias === $("model").value);
    for (const name of ["temperature", "top_p"]) {
      $(name).placeholder = model ? `default: ${model.defaults[name]}` : "default";
    }
  }

  fill(values) {
    $("system").value = values.system ?? "";
    for (const name of NUMBERS) $(name).value = values[name] ?? "";
  }

  read() {
    const values = {};
    if ($("system").value.trim()) values.system = $("system").value;
    for (const name of NUMBERS) {
      const input = $(name);
      if (!input.checkValidity()) {
        this.complain(`${input.labels[0].textContent}: ${input.validationMessage}`);
        input.focus();
        return null;
      }
      if (input.value !== "") values[name] = Number(input.value);
    }
    return values;
  }

  apply() {
    const values = this.read();
    if (!values) return;
    if (this.values.model) values.model = this.values.model;
    this.values = values;
    this.dialog.close("ok");
    this.hooks.changed(values);
  }

  complain(text) {
    $("settings-error").textContent = text;
    $("settings-error").hidden = !text;
  }

  drawPresets(selected = "") {
    const group = (label, presets, prefix) => {
      const element = document.createElement("optgroup");
      element.label = label;
      element.append(...presets.map((preset, i) => new Option(preset.name, `${prefix}${preset.id ?? i}`)));
      return element;
    };
    const select = $("preset");
    select.replaceChildren(new Option("Choose…", ""), group("Built in", BUILT_IN, "b"));
    if (this.presets.length) select.append(group("Yours", this.presets, "u"));
    select.value = selected;
    $("delete-preset").hidden = !selected.startsWith("u");
  }

  choose() {
    const value = $("preset").value;
    $("delete-preset").hidden = !value.startsWith("u");
    const preset = value.startsWith("b")
      ? BUILT_IN[Number(value.slice(1))]
      : this.presets.find((each) => `u${each.id}` === value);
    if (!preset) return;
    // A built-in one is about sampling; it leaves the system prompt alone.
    const { model, ...settings } = preset.settings;
    this.fill(value.startsWith("b") ? { system: $("system").value, max_tokens: $("max_tokens").value, ...settings } : settings);
    if (model && this.models.some((each) => each.alias === model)) this.values = { ...this.values, model };
  }

  async savePreset() {
    const settings = this.read();
    if (!settings) return;
    const name = $("preset-name").value.trim();
    if (!name) {
      this.complain("Give the preset a name.");
      return $("preset-name").focus();
    }
    await this.presetCall(() => call("POST", "presets", { name, settings }));
    const saved = this.presets.find((preset) => preset.name === name);
    if (saved) this.drawPresets(`u${saved.id}`);
  }

  async deletePreset() {
    const id = $("preset").value.slice(1);
    await this.presetCall(() => call("DELETE", `presets/${id}`));
    this.drawPresets();
  }

  async presetCall(request) {
    try {
      ({ presets: this.presets } = await request());
      this.complain("");
    } catch (error) {
      this.complain(error.message);
    }
  }
}
