// Types that the modules of the page share. Nothing here reaches a browser.

/** Rows and columns of values, as the pictures draw them. Values are row-major; NaN is a masked cell. */
export interface View {
  rows: string[];
  columns: string[];
  values: ArrayLike<number> & { forEach(take: (value: number, at: number) => void): void; some(is: (value: number) => boolean): boolean };
  texts?: string[];
  scale: string;
  top: number;
  bottomUp?: boolean;
  name: string;
}

/** Attention patterns of all heads, packed. */
export interface Pattern {
  form: "u16" | "u8" | "strongest";
  strongest: number;
  heads: (string | null)[];
  about: string;
}

export interface Axis { name: string; labels: string[] }
export interface TokenText { index: number; id: number; text: string }

/** A report, as `look/…` answers it and as `candle-gpt2-pictures` writes it. */
export interface Report {
  title: string;
  model: string;
  tokens: TokenText[];
  bos: boolean;
  axes: Axis[];
  values: (number | null)[];
  pattern?: Pattern;
  texts: string[] | null;
  metric?: { name: string; before: number; after: number | null };
  notes: string[];
  scale: string;
  bottom_up: boolean;
}

export interface GraphPoint { id: string; name: string; kind: string; row: number; column: number; influence?: number; zeroed?: [number, number]; card?: FeatureCard; command?: string }
export interface GraphLine { source: number; target: number; weight: number }
/** An attribution graph. */
export interface Graph {
  title: string;
  model: string;
  tokens: TokenText[];
  bos: boolean;
  notes: string[];
  rows: string[];
  points: GraphPoint[];
  lines: GraphLine[];
}

/** A feature of a dictionary and the texts that it is active in. */
export interface FeatureCard {
  index: number;
  density: number | null;
  act_min: number;
  act_max: number;
  top_logits: string[];
  bottom_logits: string[];
  histogram: { bin_width: number; counts: number[] };
  examples_quantiles: { quantile_name: string; examples: FeatureText[] }[];
}
export interface FeatureText { tokens: string[]; tokens_acts_list: number[]; train_token_ind: number }

/** One attention weight of one head, step by step, as `look/head` answers it. */
export interface HeadLook {
  tokens: string[];
  isUnmasked?: boolean;
  layer?: number;
  head?: number;
  query: number;
  key: number;
  head_dim: number;
  scale: number;
  q: number[];
  k: number[];
  products: number[];
  score: number;
  scaled: number;
  scores: number[];
  weights: number[];
  v: number[];
  context: number[];
}

/** What a model could do at one of its checkpoints. */
export interface Checkpoint {
  training: string;
  step: number;
  loss_per_byte: number;
  previous: number[][];
  induction: number[][];
  figures: Record<string, number>;
  sample: string;
}

/** A token with its log probability. */
export interface Chosen { token: string; logprob: number | null }
/** A piece of a text: one token, or several that share a character. */
export interface Piece { start: number; end: number; offset?: number; tokens: Chosen[] }
export interface Logprobs { tokens: string[]; token_logprobs: (number | null)[]; text_offset: number[] }
/** A token that may come next. */
export interface Candidate { id: number; token: string; probability: number; logprob: number }
export interface NextLook { tokens: Candidate[]; kept: number }

/** The text under the prompt. A scored text begins with the prompt (`isWhole`). */
export interface Written {
  prompt: string | null;
  text: string;
  pieces: Piece[];
  ids: number[];
  promptIds: number;
  seed?: string;
  isByHand: boolean;
  isWhole: boolean;
}

/** What runs now; `close` ends it on the page. */
export interface Run { close(failure: any): void }

/** Where a model comes from. */
export interface Source {
  isBuiltIn?: boolean;
  folder?: string;
  files?: { file: string; blob: Blob }[];
  tokenizer?: string;
  dtype?: string;
  kvDtype?: string;
  of?: Source;
}

/** A loaded model as its transport describes it. */
export interface Model {
  name: string;
  title: string;
  about: string;
  source: Source;
  defaults: Record<string, number>;
  config: { n_positions: number; vocab_size?: number; n_layer?: number; n_head?: number };
  inspection?: any;
  memory?: Record<string, number | null>;
  tokenizer?: string;
}

/** A transport: the engine in a worker of the page, or a server. Both take the same paths and bodies. */
export interface Engine {
  /** Whether others use it too. */
  isShared?: boolean;
  readonly hasKey?: boolean;
  BUILT_IN?: Source;
  address(): string;
  /** Begins with a source. Calls heard(null, reason) when a worker broke, and heard(model, reason) when the model came back. */
  start(source: Source, heard: (model: Model | null, reason: Error) => void): Promise<Model>;
  ask(path: string, body?: any): Promise<any>;
  /** Calls take(chunk) for each chunk of a text, until it ends or is stopped. */
  stream(path: string, body: any, take: (chunk: any) => void): Promise<void>;
  stop(): void;
  setKey?(key: string): void;
  /** Opens a source next to the present model: `see` gets its inspection before it is loaded and may reject it. The present model writes meanwhile, and stays if this fails. */
  load?(source: Source, see: (about: any) => void, progress: (done: number, total: number) => void): Promise<Model>;
  /** Ends a load; the model before stays. Returns whether there was one. */
  cancel?(): boolean;
  /** The abilities of the built-in model at each of its checkpoints. */
  history?(): Promise<Checkpoint[]>;
  /** The tokens of bytes with the bits that each costs. */
  sizes?(bytes: Uint8Array): Promise<{ id: number; bytes: number[]; bits: number }[]>;
  /** The file that `gpt2 compress` writes. */
  compress?(bytes: Uint8Array, progress: (done: number, total: number) => void): Promise<Uint8Array>;
  decompress?(bytes: Uint8Array, progress: (done: number, total: number) => void): Promise<Uint8Array>;
  stopCompressing?(): void;
}
