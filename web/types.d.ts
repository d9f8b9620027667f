// Types shared by the modules of the page; they have no runtime code.

/** Rows and columns of values for the pictures. Values are row-major; NaN is a masked cell. */
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

/** A report in the format of `look/…` and `candle-gpt2-pictures`. */
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

/** A feature of a dictionary and the texts that activate it. */
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

/** One attention weight of one head, step by step, in the format of `look/head`. */
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

/** Abilities of a model at one of its checkpoints. */
export interface Checkpoint {
  training: string;
  step: number;
  loss_per_byte: number;
  previous: number[][];
  induction: number[][];
  figures: Record<string, number>;
  sample: string;
}

/** A token with its log-probability. */
export interface Chosen { token: string; logprob: number | null }
/** A piece of a text: one token, or several that share a character. */
export interface Piece { start: number; end: number; offset?: number; tokens: Chosen[] }
export interface Logprobs { tokens: string[]; token_logprobs: (number | null)[]; text_offset: number[] }
/** A candidate for the next token. */
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

/** The current activity; `close` ends it on the page. */
export interface Run { close(failure: any): void }

/** The origin of a model. */
export interface Source {
  isBuiltIn?: boolean;
  folder?: string;
  files?: { file: string; blob: Blob }[];
  tokenizer?: string;
  dtype?: string;
  kvDtype?: string;
  of?: Source;
}

/** A loaded model as described by its transport. */
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

/** A transport: the engine in a worker, or a server. Both accept the same paths and bodies. */
export interface Engine {
  /** Whether other clients use it too. */
  isShared?: boolean;
  readonly hasKey?: boolean;
  BUILT_IN?: Source;
  address(): string;
  /**
   * Starts with a source.
   *
   * Calls heard(null, reason) after a crash, and heard(model, reason) once the model is reloaded.
   */
  start(source: Source, heard: (model: Model | null, reason: Error) => void): Promise<Model>;
  ask(path: string, body?: any): Promise<any>;
  /** Calls take(chunk) for each chunk of a completion, until it ends or is stopped. */
  stream(path: string, body: any, take: (chunk: any) => void): Promise<void>;
  stop(): void;
  setKey?(key: string): void;
  /**
   * Opens a source next to the current model.
   *
   * `see` receives its inspection before loading and may reject it. The current model keeps generating
   * meanwhile, and stays if loading fails.
   */
  load?(source: Source, see: (about: any) => void, progress: (done: number, total: number) => void): Promise<Model>;
  /** Cancels loading; the previous model stays. Returns whether a model was being loaded. */
  cancel?(): boolean;
  /** The abilities of the built-in model at each of its checkpoints. */
  history?(): Promise<Checkpoint[]>;
  /** Tokenizes bytes; returns the tokens with the cost of each in bits. */
  sizes?(bytes: Uint8Array): Promise<{ id: number; bytes: number[]; bits: number }[]>;
  /** Returns the file that `gpt2 compress` would write. */
  compress?(bytes: Uint8Array, progress: (done: number, total: number) => void): Promise<Uint8Array>;
  decompress?(bytes: Uint8Array, progress: (done: number, total: number) => void): Promise<Uint8Array>;
  stopCompressing?(): void;
}
