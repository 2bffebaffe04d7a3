// The explorers of a page: each section of class "explorer" has its data within it (see embedding.py), and is shown once
// it is drawn. Without scripts, or in an old browser, the page has its figures.
"use strict";
(async () => {
  const INK = "#1b1b1b", QUIET = "#5c5c5c", LINE = "#d9d9d9";
  const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const MAPPED = 0.998; // share of the cells whose colours a clipped scale tells apart
  const FAINT = 0.05; // share of the tokens that a logarithmic scale leaves white
  const CONFIG = {displayModeBar: false, responsive: true, doubleClick: "reset"};

  const sections = [...document.querySelectorAll(".explorer")];
  if (!sections.length || !("DecompressionStream" in window)) return;

  async function inflated(node) {
    const letters = atob(node.textContent), bytes = new Uint8Array(letters.length);
    for (let n = 0; n < letters.length; n++) bytes[n] = letters.charCodeAt(n);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }

  function float16(bits) {
    const sign = bits & 0x8000 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * fraction / 1024);
  }

  const FLOATS = Float64Array.from({length: 65536}, (_, bits) => float16(bits));

  function unpacked(buffer) {
    const length = new DataView(buffer).getUint32(0, true), body = 4 + length;
    const codes = new Uint16Array(buffer.slice(body));
    return JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)), (_, value) => {
      if (!value || value.offset === undefined) return value;
      const flat = new Float64Array(value.shape.reduce((one, other) => one * other, 1));
      for (let n = 0; n < flat.length; n++) flat[n] = value.scale * FLOATS[codes[value.offset / 2 + n]];
      return nested(flat, value.shape);
    });
  }

  function nested(flat, shape) {
    if (shape.length === 1) return flat;
    const step = flat.length / shape[0];
    return Array.from({length: shape[0]}, (_, n) => nested(flat.subarray(n * step, (n + 1) * step), shape.slice(1)));
  }

  function said(value) {
    const size = Math.abs(value), digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4;
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "not quantized" : value < 0 ? "−∞" : "∞";
    const text = size >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
    return text.replace(/^-(?=[0.]*$)/, "").replace("-", "−");
  }

  const short = value => Number(value.toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3}).replace("-", "−");

  function explorer(section, data) {
    const $ = name => section.querySelector(`[name="${name}"]`), part = name => section.querySelector(`[data-part="${name}"]`);
    const state = {map: 0, row: 0, column: 0, scale: data.scales[0]};
    const map = () => data.maps[state.map];
    const feature = () => state.column * map().share;
    const value = () => map().values[state.row][state.column];

    function columnSaid(column) {
      const {columns, share, features} = map();
      if (columns) return columns[column];
      const first = column * share, last = Math.min(first + share, features) - 1;
      return share > 1 ? `features ${first}–${last}` : `feature ${first}`;
    }
    const amount = value => data.unit && Number.isFinite(value)
      ? value.toFixed(1).replace("-", "−") + data.unit : said(value);
    const label = () => data.value + (data.unit && ` (${data.unit.trim()})`);
    const numbered = row => data.first + row;
    const place = (row, column) => `${data.row} ${numbered(row)}, ${columnSaid(column)}`;
    const allRows = () => [numbered(map().values.length) - 0.5, data.first - 0.5];

    // What a scale makes of values: numbers for colours, their ends, and the ticks of the legend.
    const SCALES = {
      log: values => {
        const positive = values.filter(x => x > 0).sort((a, b) => a - b);
        const low = Math.log10(positive[Math.floor(positive.length / 100)] || 1);
        const high = Math.max(Math.log10(positive[positive.length - 1] || 1), low + 0.1);
        const ticks = [];
        for (let power = Math.ceil(low); power <= high; power++) ticks.push(power);
        if (ticks.length < 2) ticks.splice(0, ticks.length, low, high);
        return {of: x => x > 0 ? Math.log10(x) : low, low, high, ticks, label: ", log scale"};
      },
      linear: values => ends(values, 1, ""),
      clipped: values => ends(values, MAPPED, ", clipped"),
    };

    function ends(values, share, label) {
      const finite = values.filter(Number.isFinite).sort((a, b) => a - b);
      const low = Math.min(finite[0] ?? 0, data.unit ? Infinity : 0);
      const high = finite[Math.ceil(share * finite.length) - 1] ?? 1;
      const ticks = [0, 1, 2, 3, 4].map(n => low + (high - low) * n / 4);
      return {of: x => x, low, high: high > low ? high : low + 1, ticks,
              label: label && `${label} at ${said(high)}`};
    }

    function colorscale(scale) {
      const [below, above] = data.colors;
      const share = data.threshold === null ? 0 :
        Math.min(1, Math.max(0, (scale.of(data.threshold) - scale.low) / (scale.high - scale.low)));
      const spread = (colors, start, end) => colors.map((color, n) => [start + (end - start) * n / (colors.length - 1), color]);
      if (share === 0) return spread(above, 0, 1);
      return share === 1 ? spread(below, 0, 1) : [...spread(below, 0, share), ...spread(above, share, 1)];
    }

    function cross() {
      const line = {type: "line", layer: "above", line: {color: "#56B4E9", width: 1.5, dash: "dot"}};
      return [
        {...line, xref: "x", yref: "paper", x0: state.column, x1: state.column, y0: 0, y1: 1},
        {...line, xref: "paper", yref: "y", x0: 0, x1: 1, y0: numbered(state.row), y1: numbered(state.row)},
      ];
    }

    const font = {family: getComputedStyle(document.body).fontFamily, size: 12, color: INK};

    function drawMap() {
      const {values, share, columns, column, name} = map(), scale = SCALES[state.scale](values.flatMap(row => Array.from(row)));
      const named = columns || share > 1, across = Array.from(values[0], (_, n) => named ? columnSaid(n) : n);
      const trace = {
        type: "heatmap", x: across, y: values.map((_, row) => numbered(row)), z: values.map(row => Array.from(row, scale.of)),
        zmin: scale.low, zmax: scale.high,
        customdata: values, colorscale: colorscale(scale),
        colorbar: {
          orientation: "h", thickness: 10, len: 1, x: 0.5, y: 0, yref: "container", yanchor: "bottom", outlinewidth: 0,
          tickvals: scale.ticks, ticktext: scale.ticks.map(tick => short(state.scale === "log" ? 10 ** tick : tick)),
          tickfont: {size: 11},
        },
        hovertemplate: `${data.row} %{y}, ${named ? "" : column} %{x}: %{customdata:,.4~r}${data.unit}<extra></extra>`,
      };
      const layout = {
        font, height: Math.min(640, 150 + 9 * values.length), margin: {l: 44, r: 8, t: 8, b: columns ? 140 : 80},
        xaxis: columns
          ? {type: "category", tickangle: -45, range: [-0.5, across.length - 0.5]}
          : {type: named ? "category" : "linear", title: {text: column, standoff: 4}, range: [-0.5, across.length - 0.5]},
        yaxis: {title: {text: data.row, standoff: 4}, range: allRows()},
        shapes: cross(), dragmode: "zoom", hoverlabel: {font: {size: 12}},
      };
      part("legend").textContent = `Colour: ${label()}${scale.label}` +
        (data.threshold === null ? "." : `, with a step at α = ${data.threshold}.`) +
        (share > 1 ? ` Each column is the largest of ${share} features.` : "");
      part("map").setAttribute("aria-label",
        `Map of ${name}: ${data.value} by ${data.row} and ${column}; arrow keys move the chosen cell`);
      return Plotly.react(part("map"), [trace], layout, CONFIG);
    }

    function lines(node, drawn, xTitle, yTitle, first = 0) {
      const log = state.scale === "log" && drawn.every(one => one.y.every(y => y > 0));
      const traces = drawn.map((one, n) => ({
        type: "scatter", mode: "lines", name: one.name, x: one.y.map((_, x) => first + x), y: one.y,
        line: {color: COLORS[n % COLORS.length], width: 1.5, dash: DASHES[n % DASHES.length]},
        text: one.y.map(amount), hovertemplate: `${xTitle} %{x}: %{text}<extra>${one.name}</extra>`,
      }));
      const layout = {
        font, height: 260, margin: {l: 52, r: 8, t: 8, b: 40}, showlegend: drawn.length > 1,
        legend: {orientation: "h", y: 1, yanchor: "bottom", x: 0, font: {size: 11}},
        xaxis: {title: {text: xTitle, standoff: 4}, showgrid: false, linecolor: INK, zeroline: false,
                dtick: drawn[0].y.length > TICKS ? null : 1},
        yaxis: {title: {text: yTitle, standoff: 4}, type: log ? "log" : "linear", gridcolor: LINE, zeroline: false,
                rangemode: data.unit ? "normal" : "tozero"},
      };
      return Plotly.react(node, traces, layout, CONFIG);
    }

    function drawProfiles() {
      const own = map(), column = columnSaid(state.column);
      part("heading").textContent = `${own.name}, ${column}`;
      const together = data.maps.filter(one => one.group === own.group);
      lines(part("by-row"), together.map(one => ({name: one.name, y: one.values.map(row => row[state.column])})),
        data.row, label(), data.first);
      const drawn = [], {positions, text} = own;
      const found = positions ? (positions.features ? positions.features.indexOf(feature()) : feature()) : -1;
      if (found >= 0 && own.share === 1) {
        drawn.push({name: "largest of all layers, mean over sequences", y: positions.values.map(row => row[found])});
      }
      const kept = text ? text.features.indexOf(feature()) : -1;
      if (kept >= 0) {
        drawn.push({name: `${data.row} ${numbered(state.row)}, first sequence`,
                    y: text.values[state.row].map(row => Math.abs(row[kept]))});
      }
      part("by-position").hidden = !drawn.length;
      if (drawn.length) lines(part("by-position"), drawn, "position", "|x|");
    }

    function drawText() {
      const {text, name} = map(), kept = text ? text.features.indexOf(feature()) : -1, node = part("text");
      node.hidden = !text;
      if (!text) return;
      node.replaceChildren();
      const say = (tag, words, style = "") => {
        node.append(Object.assign(document.createElement(tag), {textContent: words, className: style}));
        return node.lastChild;
      };
      if (kept < 0) {
        say("p", `The text is kept at the features that are listed above, and ${columnSaid(state.column)} is none of them.`, "quiet");
        return;
      }
      const values = text.values[state.row].map(row => row[kept]), sizes = values.map(Math.abs).sort((a, b) => a - b);
      const most = sizes[sizes.length - 1] || 1, least = Math.max(sizes[Math.floor(sizes.length * FAINT)], most / 1e4);
      const share = state.scale === "log"
        ? x => Math.max(0, Math.log(Math.abs(x) / least) / Math.log(most / least) || 0) : x => Math.abs(x) / most;
      say("p", `The beginning of the first sequence by ${columnSaid(state.column)} of ${name} in ${data.row} ${numbered(state.row)}; ` +
        `orange: positive, blue: negative; the darkest is ${said(most)}.`, "quiet");
      const line = say("p", "", "tokens");
      values.forEach((x, n) => {
        const token = Object.assign(document.createElement("span"), {
          textContent: data.tokens[n], title: `position ${n}: ${said(x)}`});
        token.style.background = `rgba(${x < 0 ? "0, 114, 178" : "213, 94, 0"}, ${share(x).toFixed(3)})`;
        if (share(x) > 0.6) token.style.color = "#fff";
        line.append(token, document.createElement("wbr"));
      });
    }

    function drawMarked() {
      const node = part("marked"), {marked, share} = map();
      node.hidden = !marked.length;
      node.replaceChildren("features to look at:", ...marked.map(number => {
        const column = Math.floor(number / share);
        const button = Object.assign(document.createElement("button"), {type: "button", textContent: number});
        button.setAttribute("aria-pressed", column === state.column);
        button.addEventListener("click", () => choose({column, row: largestRow(column)}));
        return button;
      }));
    }

    function largestRow(column) {
      const down = map().values.map(row => Number.isNaN(row[column]) ? -Infinity : row[column]);
      return down.indexOf(Math.max(...down));
    }

    function inSight() { // moves what is zoomed into so that the chosen cell is in it
      const {xaxis, yaxis} = part("map").layout, moved = {};
      for (const [name, axis, at] of [["xaxis", xaxis, state.column], ["yaxis", yaxis, numbered(state.row)]]) {
        const [start, end] = axis.range, low = Math.min(start, end), high = Math.max(start, end);
        if (at < low || at > high) {
          const by = at - (low + high) / 2;
          moved[`${name}.range`] = [start + by, end + by];
        }
      }
      return moved;
    }

    function choose(change, redraw = false) {
      Object.assign(state, change);
      const {values, columns} = map();
      if (redraw && columns) $("column").replaceChildren(...columns.map(option)); // maps may have others
      state.row = Math.min(Math.max(state.row, 0), values.length - 1);
      state.column = Math.min(Math.max(state.column, 0), values[0].length - 1);
      $("row").min = data.first;
      $("row").max = numbered(values.length - 1);
      $("row").value = numbered(state.row);
      $("column").max = map().features - 1;
      $("column").value = map().columns ? state.column : feature();
      section.querySelector("output").value =
        `${place(state.row, state.column)} of ${map().name}: ${amount(value())}`;
      if (redraw) drawMap();
      else Plotly.relayout(part("map"), {shapes: cross(), ...inSight()});
      drawMarked();
      drawProfiles();
      drawText();
    }

    function zoom(factor) {
      const {values} = map(), width = values[0].length, [start, end] = part("map").layout.xaxis.range;
      const reach = Math.min((end - start) * factor, width) / 2;
      const low = Math.min(Math.max(state.column - reach, -0.5), width - 0.5 - 2 * reach);
      Plotly.relayout(part("map"), {"xaxis.range": [low, low + 2 * reach]});
    }

    function whole() {
      const {values} = map();
      Plotly.relayout(part("map"), {"xaxis.range": [-0.5, values[0].length - 0.5], "yaxis.range": allRows()});
    }

    const option = (label, key) => new Option(label, key);
    $("map").replaceChildren(...data.maps.map((one, n) => option(one.said ? `${one.name}: ${one.said}` : one.name, n)));
    $("scale").replaceChildren(...data.scales.map(name => option(name, name)));
    $("map").addEventListener("change", event => choose({map: +event.target.value}, true));
    $("scale").addEventListener("change", event => choose({scale: event.target.value}, true));
    $("row").addEventListener("change", event => choose({row: Math.round(+event.target.value) - data.first}));
    $("column").addEventListener("change", event => choose({column: Math.floor(+event.target.value / map().share)}));
    $("in").addEventListener("click", () => zoom(0.5));
    $("out").addEventListener("click", () => zoom(2));
    $("whole").addEventListener("click", whole);
    const MOVES = {ArrowLeft: ["column", -1], ArrowRight: ["column", 1], ArrowUp: ["row", -1], ArrowDown: ["row", 1]};
    part("map").addEventListener("keydown", event => {
      const move = MOVES[event.key];
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      choose({[move[0]]: state[move[0]] + move[1]});
    });

    section.hidden = false;
    const tops = Array.from(map().values[0], (_, column) => map().values[largestRow(column)][column]);
    const largest = tops.indexOf(Math.max(...tops.filter(top => !Number.isNaN(top))));
    state.column = map().marked.length ? Math.floor(map().marked[0] / map().share) : largest;
    state.row = largestRow(state.column);
    choose({}, true);
    part("map").on("plotly_click", event => {
      const [row, column] = event.points[0].pointNumber;
      choose({row, column});
    });
    section.dataset.drawn = "";
  }

  const signed = value => value > 0 ? `+${said(value)}` : said(value);
  const LAYER = {"embedding": () => "the embedding", "attention": layer => `attention of layer ${layer}`,
                 "feed-forward": layer => `the feed-forward part of layer ${layer}`};
  const BAND = 0.16, GAP = 0.05; // of the height, the gates, and what is between them and the bars
  const TICKS = 15; // at most
  const every = (step, end) => Array.from({length: Math.ceil(end / step)}, (_, n) => n * step);
  const MOVES_PARTS = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1};

  function account(section, data) {
    const $ = name => section.querySelector(`[name="${name}"]`), part = name => section.querySelector(`[data-part="${name}"]`);
    const state = {feature: 0, place: 0, at: 0};
    const own = () => data.features[state.feature], chosen = () => own().parts[state.at];
    const values = things => things.map(one => one.values?.[state.place] ?? one[state.place]);
    const words = one => LAYER[one.part](one.layer), across = one => one.layer + data.bars[one.part].beside;
    const layers = () => own().states.length - 1;
    const font = {family: getComputedStyle(document.body).fontFamily, size: 12, color: INK};

    function most(one) { // the single writer that writes most of a part
      const [value] = values([one]), [first] = [...one.writers].filter(writer => writer.most.length)
        .sort((a, b) => (values([b])[0] - values([a])[0]) * Math.sign(value));
      return first ? `${first.name} ${signed(values([first])[0])}` : "";
    }

    function draw() {
      const {parts, states, gates} = own(), names = Object.keys(data.bars), all = [...values(parts), ...values(states), 0];
      const low = Math.min(...all), high = Math.max(...all), room = 0.06 * (high - low || 1);
      const bars = names.map(name => {
        const of = parts.filter(one => one.part === name), {color, pattern} = data.bars[name];
        return {type: "bar", name, x: of.map(across), y: values(of), width: 0.4, hoverinfo: "skip",
                marker: {color, pattern: {shape: pattern[0] || "", fillmode: "overlay", fgcolor: "#fff", size: 6, solidity: 0.15}}};
      });
      const fields = { // invisible, as high as the axes, so that small bars can be pointed at
        type: "bar", x: parts.map(across), y: parts.map(() => high - low + 2 * room), base: low - room, width: 0.4,
        customdata: parts.map((_, n) => n), marker: {color: "rgba(0,0,0,0)"}, showlegend: false,
        text: parts.map((one, n) => `${words(one)}: ${signed(values(parts)[n])}<br>${most(one)}`), textposition: "none",
        hovertemplate: "%{text}<extra></extra>",
      };
      const line = {type: "scatter", mode: "lines+markers", name: "state", x: states.map((_, layer) => layer - 0.5),
                    y: values(states), line: {color: INK, width: 1.2}, marker: {size: 4}, hoverinfo: "skip"};
      const rows = names.filter(name => gates.some(gate => gate.part === name));
      const band = {
        type: "heatmap", yaxis: "y2", colorscale: "Cividis", zmin: -4, zmax: 2, xgap: 1, ygap: 1,
        y: rows, x: states.slice(1).map((_, layer) => layer),
        z: rows.map(name => states.slice(1).map((_, layer) => gateOf(name, layer)).map(
          gate => gate ? Math.log2(Math.max(Math.abs(gate.gain) / gate.median, 1 / 16)) : null)),
        text: rows.map(name => states.slice(1).map((_, layer) => gateSaid(gateOf(name, layer)))),
        hovertemplate: "layer %{x}, before %{y}: %{text}<extra></extra>", hoverongaps: false,
        colorbar: {orientation: "h", thickness: 8, len: 0.6, x: 0.5, y: 0, yref: "container", yanchor: "bottom",
                   outlinewidth: 0, tickvals: [-4, -2, 0, 2], ticktext: ["≤ 1/16", "1/4", "1", "4"], tickfont: {size: 11}},
      };
      const layout = {
        font, height: 420, margin: {l: 88, r: 8, t: 8, b: rows.length ? 84 : 44}, bargap: 0, barmode: "overlay", hovermode: "closest",
        dragmode: "zoom", hoverlabel: {font: {size: 12}}, legend: {orientation: "h", y: 1, yanchor: "bottom", x: 0},
        xaxis: {title: {text: "layer", standoff: 4}, range: [-1.1, layers() - 0.4], showgrid: false, zeroline: false, anchor: "y2",
                tickvals: every(Math.ceil(layers() / TICKS), layers())},
        yaxis: {domain: rows.length ? [BAND + GAP, 1] : [0, 1], range: [low - room, high + room], gridcolor: LINE,
                zerolinecolor: INK, tickformat: ",~g"},
        yaxis2: {domain: [0, BAND], autorange: "reversed", fixedrange: true, showgrid: false, ticks: "", visible: rows.length > 0},
        shapes: shapes(),
      };
      const {readers} = own();
      part("legend").textContent = [
        ...(rows.length ? ["Band: |gain| of the norm in front of each part at the feature, beside the median of all features."] : []),
        ...(readers.length ? [`Without it at one place alone the perplexity rises more than without random features: ${readers.join(", ")}.`] : []),
      ].join(" ");
      return Plotly.react(part("map"), [...bars, line, fields, ...(rows.length ? [band] : [])], layout, CONFIG);
    }

    function shapes() {
      const x = across(chosen());
      return [{type: "rect", xref: "x", yref: "y domain", x0: x - 0.25, x1: x + 0.25, y0: 0, y1: 1, layer: "below",
               fillcolor: "#56B4E9", opacity: 0.35, line: {width: 0}}];
    }

    const gateOf = (name, layer) => own().gates.find(gate => gate.part === name && gate.layer === layer);
    const gateSaid = gate => gate ? `gain ${short(gate.gain)}, median ${short(gate.median)}, rank ${gate.rank}` : "";

    function drawWriters() {
      const one = chosen(), where = data.places[state.place];
      part("heading").textContent = `Writers of feature ${own().feature}: ${words(one)}`;
      part("writers").replaceChildren(...[...one.writers]
        .sort((a, b) => !a.most.length - !b.most.length || Math.abs(values([b])[0]) - Math.abs(values([a])[0]))
        .map(writer => {
          const row = document.createElement("tr"), tokens = writer.most.map(([token, position, term]) =>
            `${token} ${said(term)} (position ${position})`);
          const cells = [writer.name, ...writer.values.map(said),
                         writer.magnitude === undefined ? "-" : said(writer.magnitude), tokens.join(", ") || "-"];
          row.append(...cells.map(text => Object.assign(document.createElement("td"), {textContent: text})));
          return row;
        }));
      const gate = gateOf(one.part, one.layer), [value] = values([one]);
      const [before, after] = values(own().states.slice(Math.max(one.layer, 0)));
      part("gates").textContent = gate ? `The norm in front of it, ${gate.norm}: ${gateSaid(gate)}; ` +
        `${where}: ${said(gate.before[state.place])} before it, ${said(gate.behind[state.place])} behind it.` : "";
      section.querySelector("output").value = `Feature ${own().feature}, ${where}: ${words(one)} writes ${signed(value)}` +
        (one.layer < 0 ? `; the state before layer 0 is ${said(before)}` :
          `; the state goes from ${said(before)} before layer ${one.layer} to ${said(after)} behind it`) + ".";
    }

    function choose(change, redraw = false) {
      Object.assign(state, change);
      state.at = Math.min(Math.max(state.at, 0), own().parts.length - 1);
      $("part").replaceChildren(...own().parts.map((one, n) => new Option(words(one), n)));
      $("part").value = state.at;
      part("marked").replaceChildren("feature:", ...data.features.map((one, n) => {
        const button = Object.assign(document.createElement("button"), {type: "button", textContent: one.feature});
        button.setAttribute("aria-pressed", n === state.feature);
        button.addEventListener("click", () => choose({feature: n, at: largest(n)}, true));
        return button;
      }), data.left ? `and ${data.left} more in the tables` : "");
      if (redraw) draw();
      else Plotly.relayout(part("map"), {shapes: shapes()});
      drawWriters();
    }

    function largest(feature) {
      const sizes = values(data.features[feature].parts).map(Math.abs);
      return sizes.indexOf(Math.max(...sizes));
    }

    $("place").replaceChildren(...data.places.map((place, n) => new Option(place, n)));
    $("place").addEventListener("change", event => choose({place: +event.target.value}, true));
    $("part").addEventListener("change", event => choose({at: +event.target.value}));
    part("map").addEventListener("keydown", event => {
      const move = MOVES_PARTS[event.key];
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      choose({at: state.at + move});
    });

    section.hidden = false;
    choose({at: largest(0)}, true);
    part("map").on("plotly_click", event => {
      const {customdata, x, y} = event.points[0];
      const at = customdata ?? own().parts.findIndex(one => one.layer === x && one.part === y);
      if (at >= 0) choose({at});
    });
    section.dataset.drawn = "";
  }

  const source = new TextDecoder().decode(await inflated(document.getElementById("plotly")));
  (0, eval)(source); // which takes a third less than a script element of this size
  for (const section of sections) {
    const data = unpacked(await inflated(section.querySelector(".data")));
    (data.features ? account : explorer)(section, data);
  }
})();
