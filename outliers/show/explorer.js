// The explorers of a page: each section of class "explorer" has its data within it (see explorer.py), and is shown once
// it is drawn. Without scripts, or in an old browser, the page has its figures.
"use strict";
(async () => {
  const INK = "#1b1b1b", LINE = "#d9d9d9", SKY = "#56B4E9"; // in dark colours the page inverts what is drawn
  const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const FAINT = 0.05; // share of the tokens that a logarithmic scale leaves white
  const DEEPEST = 0.7; // share of its colour behind a token, on which text can be read
  const TICKS = 15; // at most
  const POWERS = Array.from({length: 24}, (_, n) => (n % 2 ? 3 : 1) * 10 ** (Math.floor(n / 2) - 4)); // of a logarithmic axis
  const CONFIG = {displayModeBar: false, responsive: true, doubleClick: "reset"};
  const LAYOUT = {
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: INK}, hoverlabel: {font: {size: 12}},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: "zoom", hovermode: "closest",
  };
  const BELOW = {orientation: "h", x: 0.5, y: 0, yref: "container", yanchor: "bottom", outlinewidth: 0, tickfont: {size: 11}};
  if (!("DecompressionStream" in window)) return;

  const inflated = async node => new Response((await fetch(`data:;base64,${node.textContent}`)).body
    .pipeThrough(new DecompressionStream("gzip"))).text();

  const minus = text => text.replace(/^-(?=[0.]*$)/, "").replace("-", "−");

  // Numbers as `words.amount` has them; null is nothing, and infinity a sign already.
  function said(value) {
    if (typeof value !== "number") return value ?? "not quantized";
    const size = Math.abs(value), digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4;
    return minus(size >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(digits));
  }

  const short = value => minus(Number(value.toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3}));
  const signed = value => value > 0 ? `+${said(value)}` : said(value);
  const largestOf = values => values.reduce((best, x, n) => Number.isFinite(x) && !(x <= values[best]) ? n : best, -1);
  const element = (tag, textContent, more = {}) => Object.assign(document.createElement(tag), {textContent, ...more});
  const offer = (select, labels) => select.replaceChildren(...labels.map((label, n) => new Option(label, n)));

  function buttons(node, label, names, press) { // returns what shows which of them is pressed
    const made = names.map((name, n) => element("button", name, {type: "button", onclick: () => press(n)}));
    node.replaceChildren(label, ...made);
    return chosen => made.forEach((button, n) => button.setAttribute("aria-pressed", chosen(n)));
  }

  function arrows(node, moves, go) {
    node.addEventListener("keydown", event => {
      if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      go(moves[event.key]);
    });
  }

  function maps($, part, data) {
    const state = {map: 0, row: 0, column: 0, scale: Object.keys(data.scales)[0]};
    const map = () => data.maps[state.map], scale = () => data.scales[state.scale];
    const feature = () => state.column * map().share, numbered = row => data.first + row;
    const label = data.value + (data.unit && ` (${data.unit.trim()})`);
    const amount = value => data.unit && Number.isFinite(value) ? minus(value.toFixed(1)) + data.unit : said(value);
    const inColumn = column => map().values.map(row => row[column]);
    const largestRow = column => Math.max(0, largestOf(inColumn(column)));
    const kept = things => things?.features ? things.features.indexOf(feature()) : things ? feature() : -1;
    let press;

    function columnSaid(column) {
      const {columns, share, features} = map(), first = column * share;
      if (columns) return columns[column];
      return share > 1 ? `features ${first}–${Math.min(first + share, features) - 1}` : `feature ${first}`;
    }

    function marks() { // beside the map, so that they hide none of it
      const line = {type: "line", line: {color: "#0072B2", width: 3}}, column = state.column, row = numbered(state.row);
      return [{...line, xref: "x", x0: column, x1: column, yref: "paper", ysizemode: "pixel", yanchor: 1, y0: 2, y1: 12},
              {...line, yref: "y", y0: row, y1: row, xref: "paper", xsizemode: "pixel", xanchor: 1, x0: 2, x1: 12}];
    }

    function drawMap() {
      const {values, share, columns, column, name} = map(), {log, low, high, ticks, colors} = scale();
      const z = log ? x => Number.isFinite(x) ? Math.log10(Math.max(x, low)) : null : x => x;
      const named = columns || share > 1, across = values[0].map((_, n) => named ? columnSaid(n) : n);
      const bottom = columns ? 140 : 80, height = Math.min(490, Math.max(150, 12 * values.length));
      const trace = {
        type: "heatmap", x: across, y: values.map((_, row) => numbered(row)), z: values.map(row => row.map(z)),
        zmin: z(low), zmax: z(high), customdata: values.map(row => row.map(amount)),
        colorscale: colors.map((color, n) => [n / (colors.length - 1), color]),
        colorbar: {...BELOW, thickness: 10, len: 1, tickvals: ticks.map(z), ticktext: ticks.map(short)},
        hovertemplate: `${data.row} %{y}, ${named ? "" : column} %{x}: %{customdata}<extra></extra>`,
      };
      const ends = [-0.5, across.length - 0.5], rows = [numbered(values.length) - 0.5, data.first - 0.5];
      const layout = {
        ...LAYOUT, height: height + bottom + 16, margin: {l: 44, r: 16, t: 16, b: bottom}, shapes: marks(),
        xaxis: {type: named ? "category" : "linear", range: ends, minallowed: ends[0], maxallowed: ends[1],
                ...(columns ? {tickangle: -45} : {title: {text: column, standoff: 4}})},
        yaxis: {title: {text: data.row, standoff: 4}, range: rows, minallowed: rows[1], maxallowed: rows[0],
                dtick: values.length > TICKS ? null : 1},
      };
      part("legend").textContent = `Colour: ${label}${scale().said}.` +
        (share > 1 ? ` Each column is the largest of ${share} features.` : "");
      part("map").setAttribute("aria-label",
        `Map of ${name}: ${data.value} by ${data.row} and ${column}; arrow keys move the chosen cell`);
      return Plotly.react(part("map"), [trace], layout, CONFIG);
    }

    function lines(node, drawn, xTitle, yTitle, first = 0) {
      const log = scale().log && drawn.every(one => one.y.every(y => y > 0));
      const traces = drawn.map((one, n) => ({
        type: "scatter", mode: "lines", name: one.name, x: one.y.map((_, x) => first + x), y: one.y,
        line: {color: COLORS[n % COLORS.length], width: 1.5, dash: DASHES[n % DASHES.length]},
        text: one.y.map(amount), hovertemplate: `${xTitle} %{x}: %{text}<extra>${one.name}</extra>`,
      }));
      return Plotly.react(node, traces, {
        ...LAYOUT, height: 260, margin: {l: 52, r: 8, t: 8, b: 40}, showlegend: drawn.length > 1,
        legend: {orientation: "h", y: 1, yanchor: "bottom", x: 0, font: {size: 11}},
        xaxis: {title: {text: xTitle, standoff: 4}, showgrid: false, linecolor: INK, zeroline: false,
                dtick: drawn[0].y.length > TICKS ? null : 1},
        yaxis: {title: {text: yTitle, standoff: 4}, gridcolor: LINE, zeroline: false,
                ...(log ? {type: "log", tickvals: POWERS, ticktext: POWERS.map(short)}
                        : {rangemode: data.unit ? "normal" : "tozero"})},
      }, CONFIG);
    }

    function drawProfiles() {
      const {name, group, share, text} = map(), positions = data.positions[group], drawn = [];
      part("heading").textContent = `${name}, ${columnSaid(state.column)}`;
      lines(part("by-row"), data.maps.filter(one => one.group === group)
        .map(one => ({name: one.name, y: one.values.map(row => row[state.column])})), data.row, label, data.first);
      const [mean, here] = [share === 1 ? kept(positions) : -1, kept(text)];
      if (mean >= 0) drawn.push({name: "largest of all layers, mean over sequences", y: positions.values.map(row => row[mean])});
      if (here >= 0) {
        drawn.push({name: `${data.row} ${numbered(state.row)}, first sequence`,
                    y: text.values[state.row].map(row => Math.abs(row[here]))});
      }
      part("by-position").hidden = !drawn.length;
      if (drawn.length) lines(part("by-position"), drawn, "position", "|x|");
    }

    function drawText() {
      const {text, name} = map(), here = kept(text), column = columnSaid(state.column);
      part("text").hidden = !text;
      if (!text) return;
      if (here < 0) {
        part("text").replaceChildren(element("p",
          `The text is kept at the features that are listed above, and ${column} is none of them.`, {className: "quiet"}));
        return;
      }
      const values = text.values[state.row].map(row => row[here]), sizes = values.map(Math.abs).sort((a, b) => a - b);
      const most = sizes.at(-1) || 1, least = Math.max(sizes[Math.floor(sizes.length * FAINT)], most / 1e4);
      const share = scale().log
        ? x => Math.max(0, Math.log(Math.abs(x) / least) / Math.log(most / least) || 0) : x => Math.abs(x) / most;
      const line = element("p", "", {className: "tokens"});
      values.forEach((x, n) => {
        const token = element("span", data.tokens[n], {title: `position ${n}: ${said(x)}`});
        token.style.background = `rgba(${x < 0 ? "0, 114, 178" : "213, 94, 0"}, ${(DEEPEST * share(x)).toFixed(3)})`;
        line.append(token, document.createElement("wbr"));
      });
      part("text").replaceChildren(element("p", `The beginning of the first sequence by ${column} of ${name} in ` +
        `${data.row} ${numbered(state.row)}; orange: positive, blue: negative; the darkest is ${said(most)}.`,
        {className: "quiet"}), line);
    }

    function inSight() { // moves what is zoomed into so that the chosen cell is in it
      const moved = {};
      for (const [name, at] of [["xaxis", state.column], ["yaxis", numbered(state.row)]]) {
        const [start, end] = part("map").layout[name].range;
        if (at < Math.min(start, end) || at > Math.max(start, end)) {
          moved[`${name}.range`] = [start, end].map(x => x + at - (start + end) / 2);
        }
      }
      return moved;
    }

    function choose(change, redraw = false) {
      Object.assign(state, change);
      const {values, columns, marked, name, share, features} = map();
      state.row = Math.min(Math.max(state.row, 0), values.length - 1);
      state.column = Math.min(Math.max(state.column, 0), values[0].length - 1);
      if (redraw) {
        if (columns) offer($("column"), columns); // maps may have others
        Object.assign($("row"), {min: data.first, max: numbered(values.length - 1)});
        $("column").max = features - 1;
        part("marked").hidden = !marked.length;
        const columnOf = n => Math.floor(marked[n] / share);
        const pressed = buttons(part("marked"), "features to look at:", marked,
          n => choose({column: columnOf(n), row: largestRow(columnOf(n))}));
        press = () => pressed(n => columnOf(n) === state.column);
        drawMap();
      } else {
        Plotly.relayout(part("map"), {shapes: marks(), ...inSight()});
      }
      press();
      $("row").value = numbered(state.row);
      $("column").value = columns ? state.column : feature();
      part("said").value = `${data.row} ${numbered(state.row)}, ${columnSaid(state.column)} of ${name}: ` +
        amount(values[state.row][state.column]);
      drawProfiles();
      drawText();
    }

    function zoom(factor) { // about the chosen column
      const width = map().values[0].length, [start, end] = part("map").layout.xaxis.range;
      const reach = Math.min((end - start) * factor, width) / 2;
      const low = Math.min(Math.max(state.column - reach, -0.5), width - 0.5 - 2 * reach);
      Plotly.relayout(part("map"), {"xaxis.range": [low, low + 2 * reach]});
    }

    offer($("map"), data.maps.map(one => one.said ? `${one.name}: ${one.said}` : one.name));
    $("scale").replaceChildren(...Object.keys(data.scales).map(name => new Option(name)));
    $("scale").parentNode.hidden = $("scale").length < 2;
    $("map").addEventListener("change", event => choose({map: +event.target.value}, true));
    $("scale").addEventListener("change", event => choose({scale: event.target.value}, true));
    $("row").addEventListener("change", event => choose({row: Math.round(+event.target.value) - data.first}));
    $("column").addEventListener("change", event => choose({column: Math.floor(+event.target.value / map().share)}));
    $("in").addEventListener("click", () => zoom(0.5));
    $("out").addEventListener("click", () => zoom(2));
    $("whole").addEventListener("click", drawMap);
    arrows(part("map"), {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]},
      ([down, right]) => choose({row: state.row + down, column: state.column + right}));
    const tops = map().values[0].map((_, column) => inColumn(column)[largestRow(column)]);
    state.column = map().marked.length ? Math.floor(map().marked[0] / map().share) : Math.max(0, largestOf(tops));
    state.row = largestRow(state.column);
    choose({}, true);
    part("map").on("plotly_click", event => {
      const [row, column] = event.points[0].pointNumber;
      choose({row, column});
    });
  }

  const LAYER = {"embedding": () => "the embedding", "attention": layer => `attention of layer ${layer}`,
                 "feed-forward": layer => `the feed-forward part of layer ${layer}`};
  const BAND = 0.16, GAP = 0.05; // of the height, the gates, and what is between them and the bars

  function account($, part, data) {
    const state = {feature: 0, place: 0, at: 0};
    const own = () => data.features[state.feature], chosen = () => own().parts[state.at];
    const at = one => (Array.isArray(one) ? one : one.values)[state.place], values = things => things.map(at);
    const words = one => LAYER[one.part](one.layer), across = one => one.layer + data.bars[one.part].beside;
    const gateOf = (name, layer) => own().gates.find(gate => gate.part === name && gate.layer === layer);
    const gateSaid = gate => gate ? `gain ${short(gate.gain)}, median ${short(gate.median)}, rank ${gate.rank}` : "";
    const largest = feature => largestOf(values(data.features[feature].parts).map(Math.abs));

    function most(one) { // the single writer that writes most of a part
      const single = one.writers.filter(writer => writer.most.length);
      const first = single[largestOf(values(single).map(value => value * Math.sign(at(one))))];
      return first ? `${first.name} ${signed(at(first))}` : "";
    }

    function draw() {
      const {parts, states, gates, readers} = own(), names = Object.keys(data.bars), layers = states.slice(1).map((_, n) => n);
      const all = [...values(parts), ...values(states), 0], low = Math.min(...all), high = Math.max(...all);
      const room = 0.06 * (high - low || 1), rows = names.filter(name => gates.some(gate => gate.part === name));
      const bars = names.map(name => {
        const of = parts.filter(one => one.part === name), {color, pattern} = data.bars[name];
        return {type: "bar", name, x: of.map(across), y: values(of), width: 0.4, hoverinfo: "skip",
                marker: {color, pattern: {shape: pattern[0] || "", fillmode: "overlay", fgcolor: "#fff", size: 6, solidity: 0.15}}};
      });
      const line = {type: "scatter", mode: "lines+markers", name: "state", x: states.map((_, layer) => layer - 0.5),
                    y: values(states), line: {color: INK, width: 1.2}, marker: {size: 4}, hoverinfo: "skip"};
      const fields = { // invisible, as high as the axes, so that small bars can be pointed at
        type: "bar", x: parts.map(across), y: parts.map(() => high - low + 2 * room), base: low - room, width: 0.4,
        customdata: parts.map((_, n) => n), marker: {color: "rgba(0,0,0,0)"}, showlegend: false,
        text: parts.map(one => `${words(one)}: ${signed(at(one))}<br>${most(one)}`), textposition: "none",
        hovertemplate: "%{text}<extra></extra>",
      };
      const byGate = of => rows.map(name => layers.map(layer => of(gateOf(name, layer))));
      const band = {
        type: "heatmap", yaxis: "y2", colorscale: "Cividis", zmin: -4, zmax: 2, xgap: 1, ygap: 1, y: rows, x: layers,
        z: byGate(gate => gate ? Math.log2(Math.max(Math.abs(gate.gain) / gate.median, 1 / 16)) : null),
        text: byGate(gateSaid), hovertemplate: "layer %{x}, before %{y}: %{text}<extra></extra>", hoverongaps: false,
        colorbar: {...BELOW, thickness: 8, len: 0.6, tickvals: [-4, -2, 0, 2], ticktext: ["≤ 1/16", "1/4", "1", "4"]},
      };
      part("legend").textContent = [
        ...(rows.length ? ["Band: |gain| of the norm in front of each part at the feature, beside the median of all features."] : []),
        ...(readers.length ? [`Without it at one place alone the perplexity rises more than without random features: ${readers.join(", ")}.`] : []),
      ].join(" ");
      return Plotly.react(part("map"), [...bars, line, fields, ...(rows.length ? [band] : [])], {
        ...LAYOUT, height: 420, margin: {l: 88, r: 8, t: 8, b: rows.length ? 84 : 44}, bargap: 0, barmode: "overlay",
        legend: {orientation: "h", y: 1, yanchor: "bottom", x: 0}, shapes: marks(),
        xaxis: {title: {text: "layer", standoff: 4}, range: [-1.1, layers.length - 0.4], showgrid: false, zeroline: false,
                anchor: "y2", tickvals: layers.filter(layer => layer % Math.ceil(layers.length / TICKS) === 0)},
        yaxis: {domain: rows.length ? [BAND + GAP, 1] : [0, 1], range: [low - room, high + room], gridcolor: LINE,
                zerolinecolor: INK, tickformat: ",~g"},
        yaxis2: {domain: [0, BAND], autorange: "reversed", fixedrange: true, showgrid: false, ticks: "", visible: rows.length > 0},
      }, CONFIG);
    }

    function marks() {
      const x = across(chosen());
      return [{type: "rect", xref: "x", yref: "y domain", x0: x - 0.25, x1: x + 0.25, y0: 0, y1: 1, layer: "below",
               fillcolor: SKY, opacity: 0.35, line: {width: 0}}];
    }

    function drawWriters() {
      const one = chosen(), where = data.places[state.place], gate = gateOf(one.part, one.layer);
      part("heading").textContent = `Writers of feature ${own().feature}: ${words(one)}`;
      part("writers").replaceChildren(...[...one.writers]
        .sort((a, b) => !a.most.length - !b.most.length || Math.abs(at(b)) - Math.abs(at(a)))
        .map(({name, values, magnitude, most}) => {
          const row = document.createElement("tr");
          const tokens = most.map(([token, position, term]) => `${token} ${said(term)} (position ${position})`);
          row.append(...[name, ...values.map(said), magnitude === undefined ? "–" : said(magnitude), tokens.join(", ") || "–"]
            .map(text => element("td", text)));
          return row;
        }));
      part("gates").textContent = gate ? `The norm in front of it, ${gate.norm}: ${gateSaid(gate)}; ${where}: ` +
        `${said(gate.before[state.place])} before it, ${said(gate.behind[state.place])} behind it.` : "";
      const [before, after] = values(own().states.slice(Math.max(one.layer, 0)));
      part("said").value = `Feature ${own().feature}, ${where}: ${words(one)} writes ${signed(at(one))}` +
        (one.layer < 0 ? `; the state before layer 0 is ${said(before)}` :
          `; the state goes from ${said(before)} before layer ${one.layer} to ${said(after)} behind it`) + ".";
    }

    function choose(change, redraw = false) {
      Object.assign(state, change);
      state.at = Math.min(Math.max(state.at, 0), own().parts.length - 1);
      if (redraw) {
        offer($("part"), own().parts.map(words));
        draw();
      } else {
        Plotly.relayout(part("map"), {shapes: marks()});
      }
      $("part").value = state.at;
      press(n => n === state.feature);
      drawWriters();
    }

    const press = buttons(part("marked"), "feature:", data.features.map(one => one.feature),
      n => choose({feature: n, at: largest(n)}, true));
    if (data.left) part("marked").append(`and ${data.left} more in the tables`);
    offer($("place"), data.places);
    $("place").addEventListener("change", event => choose({place: +event.target.value}, true));
    $("part").addEventListener("change", event => choose({at: +event.target.value}));
    arrows(part("map"), {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1}, move => choose({at: state.at + move}));
    choose({at: largest(0)}, true);
    part("map").on("plotly_click", event => {
      const {customdata, x, y} = event.points[0];
      const at = customdata ?? own().parts.findIndex(one => one.layer === x && one.part === y);
      if (at >= 0) choose({at});
    });
  }

  (0, eval)(await inflated(document.getElementById("plotly"))); // which takes a third less than a script element of this size
  for (const section of document.querySelectorAll(".explorer")) {
    const data = JSON.parse(await inflated(section.querySelector(".data")));
    section.hidden = false;
    (data.features ? account : maps)(name => section.querySelector(`[name="${name}"]`),
      name => section.querySelector(`[data-part="${name}"]`), data);
    section.dataset.drawn = "";
  }
})();
