// Tests that the notebook gets no keys that are typed in a panel.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { guardKeys } from "../../../extension/sparkring/views/panel/src/keys.js";

// A page with only one element, which is in a panel.
class Page extends EventTarget {
  closest() { return this; }
  setAttribute() { this.guarded = true; }
  removeAttribute() { this.guarded = false; }
}

// Type a key, and return whether the notebook's shortcuts ignore it.
function typed(key, modifiers = {}) {
  window.dispatchEvent(Object.assign(new Event("keydown"), { key, ...modifiers }));
  return Boolean(window.guarded);
}

beforeEach(() => { globalThis.window = globalThis.document = new Page(); });

test("keys are guarded, except those that the notebook still gets", () => {
  const leave = guardKeys();
  assert.equal(typed("d"), true);
  assert.equal(typed("Enter", { shiftKey: true }), false);
  leave();
});

test("the panels of each kernel have a guard of their own", () => {
  const leave = guardKeys(), other = guardKeys();
  leave();
  assert.equal(typed("d"), true);
  assert.equal(typed("Enter", { shiftKey: true }), false);
  other();
  assert.equal(typed("Enter"), false);
});
