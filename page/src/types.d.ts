// The types that several modules share, for the type checker alone.

type Child = Node | string | number | null | undefined | false | Child[];
type Filling = Record<string, any> | Child; // of an element: its attributes, or a part of its content
type Language = "en" | "zh";
type Say = (key: string, values?: Record<string, any>) => string; // a text in the page's language
type Numbers = Float64Array | Float32Array | Uint8Array | Int32Array | Uint32Array;
type NumberArray = { shape: number[]; data: Numbers };
type Rows = { data: Numbers; start: number; width: number }; // rows of `width` numbers from `start` on
type Cell = (i: number, j: number) => number;
type Test = (i: number, j: number) => boolean;

/** A layer of a run to show, as view/long.py describes it. */
interface Layer {
  name: string;
  heads: number[];
  statistics: Record<string, (number | null)[]>;
  arrays: Record<string, string>;
  [field: string]: any;
}
interface Header {
  runs: { name: string; tokens: string[] | null; pads: number[]; layers: Layer[]; [field: string]: any }[];
  arrays: Record<string, { at: number; shape: number[]; dtype: string; packed: number }>;
  [field: string]: any;
}
type Page = Awaited<ReturnType<typeof import("./container.js").openPage>>;

type Rules = ReturnType<typeof import("./attention.js").rulesOf>;

/** Places in the document; query −1: the last that is no padding, key −1: the one with the query's largest weight. */
type Chosen = { run: number; layer: number; head: number; query: number; key: number };
type Address = { run: number; layer: number; head: number };
/** The chosen place, shared by all rooms of the page. */
interface Place {
  chosen: Chosen;
  live: Live | null; // of a page that holds its model
  follow(room: string, follow: (place: Place) => void): void; // a room follows all changes that it did not make itself
  choose(from: string, change: Partial<Chosen>): void;
  again(): void; // the run's numbers are others
}
type Shell = ReturnType<typeof import("./shell.js").openShell>;
type Answer = ReturnType<typeof import("./answer.js").answerRoom>;
type Live = ReturnType<typeof import("./live/room.js").openLive> & { bar?: (shell: Shell) => HTMLElement };

/** Colours: shade(x) is a value's place on the scale, 0 to 1; along(t) the colour of a place; colour(x) that of a value. */
type Shade = ReturnType<typeof import("./colour.js").weighed>;

interface Matrix {
  symbol: string;
  role: string; // query, key, value, weights or plain: decides its colours
  rows: number;
  cols: number;
  rowDim: string;
  colDim: string;
  value: Cell;
  shade: Shade;
  rowName?: ((i: number) => string) | null;
  colName?: ((j: number) => string) | null;
  hidden?: Test | null; // masked cells
  split?: number; // columns of one head, where several heads stand side by side: a line is drawn between them
  flip?: boolean; // drawn as its transpose
}
type Block = { m: Matrix; x: number; y: number; w: number; h: number; named: string; measured: string };
type Label = { text: string; x: number; y: number; role?: string; end?: boolean };
type Layout = { blocks: Block[]; width: number; height: number; marks: Label[] };
type Mark = { block: number; row?: number; col?: number; kind?: string };
type Spot = { block: number; row: number; col: number }; // a block of a figure, and a cell of its matrix
type AxisUnits = Record<string, number>; // pixels for one step along each axis

/** What the steps show; `state` is what the reader chose. */
type Story = ReturnType<typeof import("./story.js").makeStory>;
type State = Omit<Chosen, "run"> & { batch: number; feature: number; next: number; less: number; version: number };
type StateAxis = "query" | "key" | "feature"; // the entry of the state that an axis's index is stored in
type Part = { b: Matrix; r: Matrix; axes: [StateAxis, StateAxis]; bias?: Cell; extra?(i: number, j: number): Child };

/** A result in a figure, and what each of its cells is made from: rows, columns or cells of other blocks. */
interface Result {
  block: number;
  r: Matrix;
  axes: [StateAxis, StateAxis];
  from: { block: number; kind: string; row?: number; col?: number; line?: boolean }[]; // row, col: 0 where the result's row says which, 1 where its column does; line: the whole row is meant
  written(row: number, col: number): Child;
}
/** One figure of a step. */
interface Scene {
  layout: Layout;
  cursor(): Spot; // the chosen cell
  locate(spot: Spot): Spot; // the result that a cell of the figure belongs to
  marks(spot: Spot): Mark[];
  written(spot: Spot): Child;
  pin(spot: Spot): void;
  next?(block: number, by: number): number | null; // the result beside this one
  notes?: string[];
}
type Section = ReturnType<typeof import("./section.js").section>;

type Head = Awaited<ReturnType<typeof import("./long/source.js").openHead>>;
type Picture = NonNullable<Head["small"]>;
type Frame = ReturnType<typeof import("./long/view.js").frame>;

/** What the view of a head is made from. */
interface Source {
  page: Page;
  state: ReturnType<typeof import("./long/page.js").newState>;
  answer: Answer;
  dive: ReturnType<typeof import("./dive.js").diveRoom>;
  place: Place;
  shell: Shell;
  here: HTMLElement;
  head: Head;
  pick(at: Address): void; // goes round where there is no such layer or head
  failed(why: unknown): null;
}
/** The view of one head, and what the map, the text and the controls change of it. */
type Look = ReturnType<typeof import("./long/look.js").lookAt>;

/** What the reader has changed in the run of the model that the page holds; places are numbers of tokens. */
interface Change {
  hidden: number[]; // no other token sees these
  cuts: [number, number, number, number][]; // layer, head, query, key
  off: [layer: number, head: number, row?: number][]; // from a row on
  scale: "sqrt" | "none" | "d_k"; // scores are divided by √d_k, by 1 or by d_k
  causal: boolean;
  temperature: number; // of the softmax
  over: "rows" | "columns" | "all"; // what it makes sum to 1
}
/** One layer of the live run. */
interface LayerRun {
  x: Float32Array; // what the attention reads, (n, d_model)
  q: Float32Array; // (heads, n, d_k), as k and v are
  k: Float32Array;
  v: Float32Array;
  heads: { weights: Float32Array; seen: Uint8Array; sums: Float64Array }[]; // (n, n) and (n,): log-sum-exps
}
/** A file of sentences: by key, each in English and in Chinese, with | between them. build.js reads it. */
declare module "*.toml" {
  const words: Record<string, string>;
  export default words;
}
/** A program in WebAssembly, as its bytes. build.js assembles it. */
declare module "*.wat" {
  const program: Uint8Array<ArrayBuffer>;
  export default program;
}
