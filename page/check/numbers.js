// For tests/test_long_files.py and tests/test_page_values.py: what the page makes of lists of numbers, as JSON.
//   node page/check/numbers.js '{"reach": [[0.5, "NaN"]], "within": [[0.25, 1e-6]]}'
import { reachOf } from "../src/long/tiles.js";
import { percent, within } from "../src/numbers.js";

const { reach = [], within: pairs = [], percent: shares = [] } = JSON.parse(process.argv[2]);
const reached = reach.map((peaks) => reachOf(peaks.map(Number)));
const bounded = pairs.map(([x, off]) => within(x, off));
console.log(JSON.stringify({ reach: reached, within: bounded, percent: shares.map(percent) }));
