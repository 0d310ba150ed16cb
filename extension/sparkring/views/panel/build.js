// Bundles src/ into panel.bundle.js and panel.bundle.css. Both are committed, so node is not needed to install sparkring.
// `node build.js --check` writes nothing, and fails if the committed bundles do not match the sources.
//
// Each bundle begins with a digest of its sources, so a machine without node can also check whether it is up to date:
// see tests/views/test_panel_bundle.py.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const sources = ["../style.css", "build.js", "package-lock.json", ...readdirSync(`${HERE}src`).sort().map((name) => `src/${name}`)];
const digest = createHash("sha256");
for (const name of sources) digest.update(`${name}\n${readFileSync(HERE + name, "utf8")}`);
const banner = `/* Made by build.js from src/ (sha256 ${digest.digest("hex")}), with uPlot, whose licence is in uPlot.LICENSE. */`;

const licence = { path: `${HERE}uPlot.LICENSE`, contents: readFileSync(`${HERE}node_modules/uplot/LICENSE`) };
const { outputFiles } = await build({
  absWorkingDir: HERE,
  entryPoints: { "panel.bundle": "src/index.js" },
  outdir: ".",
  bundle: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  minify: true,
  banner: { js: banner, css: banner },
  write: false,
});

for (const { path, contents } of [...outputFiles, licence]) {
  if (!process.argv.includes("--check")) writeFileSync(path, contents);
  else if (!readFileSync(path).equals(Buffer.from(contents))) {
    console.error(`${path} does not match src/: run \`make panel\`, and commit what it writes.`);
    process.exitCode = 1;
  }
}
