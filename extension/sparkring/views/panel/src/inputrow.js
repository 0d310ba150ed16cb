// Shows the prompt of a rank that calls input(), and a field for the user's answer. While a cell is running, the kernel
// itself asks the user below the cell, and there is no field.

import { button, make, put } from "./elements.js";

// Return a text that identifies a question. Each process of a rank counts its questions from 1, so after a restart, only the
// time differs.
function keyOf({ rank, number, time }) {
  return `${rank} ${number} ${time}`;
}

export class InputRow {
  // `answer(rank, number, text)` sends the answer to request `number` of a rank.
  constructor(answer) {
    this.answer = answer;
    this.sent = new Set();
    this.prompt = make("span", { class: "sr-prompt" });
    this.field = make("input", { type: "text", autocomplete: "off", spellcheck: "false" });
    // A <form> would not be submitted: JupyterLab takes the Enter key away from forms in outputs.
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) this.submit();
    });
    this.form = make("div", { class: "sr-answer" }, this.field,
      button("sr-tool", "send", "send the answer to the rank", () => this.submit()));
    this.element = make("div", { class: "sr-asks", role: "status", hidden: true }, this.prompt, this.form);
  }

  // Show the first of the questions, which are objects with the fields rank, number, time, prompt and hidden.
  draw(asks, answers) {
    const first = asks.find((asked) => !this.sent.has(keyOf(asked)));
    this.element.hidden = !first;
    if (!first) return;
    const key = keyOf(first);
    if (this.key !== key) {
      Object.assign(this, { key, first });
      this.field.value = "";
      this.field.type = first.hidden ? "password" : "text";
      this.field.setAttribute("aria-label", `Answer to rank ${first.rank}`);
    }
    const more = asks.length > 1 ? ` (${asks.length - 1} more waiting)` : "";
    const one = `rank ${first.rank} asks${more}: ${first.prompt}`; // below the cell, the kernel may ask for another rank
    put(this.prompt, answers ? one : asks.length > 1 ? `${asks.length} ranks ask (answer in the field below)` : `${one} (answer in the field below)`);
    this.form.hidden = !answers;
  }

  submit() {
    this.sent.add(this.key);
    this.answer(this.first.rank, this.first.number, this.field.value);
    this.field.value = "";
  }
}
