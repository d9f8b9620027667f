//! Generates files from the option structs for models, views, evaluation and training.
//!
//! clap describes the fields. The generated parts are the signatures and stubs of Python's views, `evaluate`
//! and `tokenize`, and a page of the book. The test fails if a file is stale; see `options.rs`.

use std::any::TypeId;
use std::fmt::Write;
use std::path::PathBuf;

use candle_gpt2_engine::ModelOptions;
use candle_gpt2_evaluation::EvaluationOptions;
use candle_gpt2_jobs::{ShardFormat, TokenWidth, TokenizeOptions, TrainOptions};
use candle_gpt2_look::{
    Ablate, Activations, Attention, Attribute, CircuitSearch, EdgeAmount, Estimate, FeatureSetting, Features,
    Graph, HeadKinds, Heads, Lens, Neuron, Neurons, Patch, PathPatching, Ranges, Replacement, Saliency,
    TaskData, TokenChoice,
};
use clap::{Arg, ArgAction, Args, Command};

use super::options::{expect_file, generation_sections, with_between};

/// Lines that precede and follow the views in the stub.
const STUB: [&str; 2] = ["    # Generated from the options of the analyses.\n", "    # Other methods.\n"];
/// Evaluation options that Python replaces with other parameters; in Python, `base` is a model.
const EXCLUDED_FROM_EVALUATE: [&str; 4] = ["protocols", "data", "base", "base_dtype"];
/// Reserved words in Python.
const RESERVED: [&str; 3] = ["as", "from", "with"];

fn command<T: Args>() -> Command {
    T::augment_args(Command::new("options"))
}

/// Method of Python's `Model`.
///
/// `named` lists the parameters whose types are set by hand, and `without` the options that are not keywords.
struct Method {
    name: &'static str,
    /// Python type of the details in the method's picture.
    details: &'static str,
    options: Command,
    named: &'static [(&'static str, &'static str)],
    without: &'static [&'static str],
}

fn methods() -> Vec<Method> {
    let method = |name, details, options, named| Method { name, details, options, named, without: &[] };
    let text: &[_] = &[("text", "_Text")];
    let texts: &[_] = &[("clean", "_Text"), ("corrupt", "_Text")];
    vec![
        Method { without: &["tuned"], ..method("logit_lens", "_LensDetails", command::<Lens>(), text) },
        method("tuned_lens", "_LensDetails", command::<Lens>(), &[("text", "_Text"), ("tuned", "_Path")]),
        method("attention", "_NoDetails", command::<Attention>(), text),
        method("attribute", "_AttributeDetails", command::<Attribute>(), text),
        method("ablate", "_NoDetails", command::<Ablate>(), text),
        method("patch", "_PatchDetails", command::<Patch>(), texts),
        method("estimate", "_PatchDetails", command::<Estimate>(), texts),
        method("path", "_PathDetails", command::<PathPatching>(), texts),
        method("saliency", "_SaliencyDetails", command::<Saliency>(), text),
        method(
            "neurons",
            "_NeuronsDetails",
            command::<Neurons>(),
            &[("text", "_Text"), ("neuron", "str | tuple[int, int]")],
        ),
        method(
            "features",
            "_FeaturesDetails",
            command::<Features>(),
            &[("text", "_Text | None"), ("sae", "_Path = \"built-in\"")],
        ),
        method("attribution_graph", "_GraphDetails", command::<Graph>(), text),
        method(
            "circuit",
            "_CircuitDetails",
            command::<CircuitSearch>(),
            &[("data", "_Path | Sequence[Mapping[str, object]]")],
        ),
        method("heads", "_NoDetails", command::<HeadKinds>(), &[("text", "_Text | None = None")]),
    ]
}

/// Returns an option's name in every front end except the command line.
fn name(option: &Arg) -> String {
    option.get_long().unwrap_or(option.get_id().as_str()).replace('-', "_")
}

fn keyword(option: &Arg) -> String {
    let name = name(option);
    if RESERVED.contains(&name.as_str()) { name + "_" } else { name }
}

/// Returns the Python type of an option.
fn python_type(option: &Arg) -> String {
    if matches!(option.get_action(), ArgAction::SetTrue) {
        return "bool".into();
    }
    let choices = option.get_possible_values();
    if !choices.is_empty() {
        let names: Vec<_> = choices.iter().map(|choice| format!("{:?}", choice.get_name())).collect();
        return format!("Literal[{}]", names.join(", "));
    }
    let types = [
        (TypeId::of::<String>(), "str"),
        (TypeId::of::<PathBuf>(), "_Path"),
        (TypeId::of::<usize>(), "int"),
        (TypeId::of::<u32>(), "int"),
        (TypeId::of::<i64>(), "int"),
        (TypeId::of::<u64>(), "int"),
        (TypeId::of::<f64>(), "float"),
        (TypeId::of::<ShardFormat>(), "Literal[\"nanogpt\", \"llm.c\"]"),
        (TypeId::of::<TokenWidth>(), "Literal[\"u16\", \"u32\"]"),
        (TypeId::of::<Heads>(), "_Heads"),
        (TypeId::of::<Ranges>(), "_Numbers"),
        (TypeId::of::<Neuron>(), "str | tuple[int, int]"),
        (TypeId::of::<TokenChoice>(), "_Token"),
        (TypeId::of::<Replacement>(), "_Instead"),
        (TypeId::of::<FeatureSetting>(), "str"),
        (TypeId::of::<EdgeAmount>(), "str | int"),
    ];
    let known = types.iter().find(|(id, _)| option.get_value_parser().type_id() == *id);
    let (_, known) = known.unwrap_or_else(|| panic!("{}: no Python type", option.get_id()));
    match option.get_action() {
        // A single file or a list of files.
        ArgAction::Append if *known == "_Path" => "_Path | Sequence[_Path]".into(),
        ArgAction::Append => format!("Sequence[{known}]"),
        _ => (*known).to_owned(),
    }
}

/// Returns the default value in Python syntax.
fn python_default(option: &Arg) -> String {
    if matches!(option.get_action(), ArgAction::SetTrue) {
        return "False".into();
    }
    match option.get_default_values().first().and_then(|default| default.to_str()) {
        None => "None".into(),
        Some(number) if number.parse::<f64>().is_ok() => number.to_owned(),
        Some(text) => format!("{text:?}"),
    }
}

fn options<'a>(command: &'a Command, without: &'a [&str]) -> impl Iterator<Item = &'a Arg> {
    command.get_arguments().filter(move |option| !without.contains(&name(option).as_str()))
}

/// Returns the Python signature that accepts the options as keywords.
fn signature(named: &str, command: &Command, without: &[&str], last: &str) -> String {
    let keywords = options(command, without)
        .map(|option| format!("{}={}, ", keyword(option), python_default(option).replace('"', "'")));
    format!("({named}, *, {}{last})", keywords.collect::<String>()).replace(", )", ")")
}

/// Returns the stub lines for a method's options, one line per option.
fn stub(command: &Command, without: &[&str]) -> String {
    let line = |option: &Arg| {
        let (name, kind, default) = (keyword(option), python_type(option), python_default(option));
        let or_none = if default == "None" { " | None" } else { "" };
        format!("        {name}: {kind}{or_none} = {default},\n")
    };
    options(command, without).map(line).collect()
}

#[test]
fn python_signatures_match_the_options() {
    expect_file("crates/python/src/look.rs", |found| {
        methods().iter().fold(found.to_owned(), |text, Method { name, options, named, without, .. }| {
            let names: Vec<_> = named.iter().map(|(name, _)| *name).collect();
            let without = [&names[..], without].concat();
            // Methods with an optional text are written separately. All others are entries in a macro.
            let own = match *name {
                "heads" => Some(("(text = None, **options)", "text=None")),
                "features" => Some(("(text, sae = None, **options)", "text, sae='built-in'")),
                _ => None,
            };
            let names = own.map_or_else(|| names.join(", "), |(_, names)| names.to_owned());
            let start = own.map_or_else(
                || format!("    {name}: "),
                |(signature, _)| format!("{signature}, text_signature = \""),
            );
            let (before, row) = text.split_once(&start).unwrap();
            let (look, rest) = row.split_at(if own.is_some() { 0 } else { row.find('"').unwrap() + 1 });
            let (_, after) = rest.split_once('"').unwrap();
            let signature = signature(&format!("$self, {names}"), options, &without, "prepend_bos=False");
            format!("{before}{start}{look}{signature}\"{after}")
        })
    });
    for (file, function, own, options, without, last) in [
        (
            "inside",
            "    fn run_with_cache",
            "$self, text, names=None, hooks=None, prepend_bos=False",
            command::<Activations>(),
            &[][..],
            "",
        ),
        (
            "evaluate",
            "    fn evaluate",
            "$self, protocol, data=None",
            command::<EvaluationOptions>(),
            &EXCLUDED_FROM_EVALUATE,
            "base=None",
        ),
        (
            "tokenize",
            "#[expect",
            "data, out",
            command::<TokenizeOptions>(),
            &[],
            "model=None, tokenizer=None, n_head=None, offline=False",
        ),
        ("task_data", "    fn task_data", "$self, task", command::<TaskData>(), &["task"], ""),
    ] {
        expect_file(&format!("crates/python/src/{file}.rs"), |found| {
            let ends = ["**options), text_signature = \"", &format!("\")]\n{function}")];
            with_between(found, ends, &signature(own, &options, without, last))
        });
    }
}

#[test]
fn python_stubs_match_the_options() {
    let mut lines = String::from(
        "    def run_with_cache(\n        self,\n        text: _Text,\n        names: str | Sequence[str] | None = None,\n        \
         hooks: _Hooks | None = None,\n        prepend_bos: bool = False,\n        *,\n",
    );
    lines += &stub(&command::<Activations>(), &[]);
    lines += "    ) -> tuple[_Floats, dict[str, _Floats]]: ...\n";
    for Method { name, details, options, named, without } in methods() {
        writeln!(lines, "    def {name}(\n        self,").unwrap();
        named.iter().for_each(|(name, kind)| writeln!(lines, "        {name}: {kind},").unwrap());
        let names: Vec<_> = named.iter().map(|(name, _)| *name).chain(without.iter().copied()).collect();
        let options = stub(&options, &names);
        write!(
            lines,
            "        *,\n{options}        prepend_bos: bool = False,\n    ) -> Picture[{details}]: ...\n"
        )
        .unwrap();
    }
    let data = command::<TaskData>();
    let task = options(&data, &[]).find(|option| name(option) == "task").map(python_type).unwrap();
    write!(
        lines,
        "    def task_data(\n        self,\n        task: {task},\n        *,\n{}    ) -> list[_PromptPair]: ...\n",
        stub(&data, &["task"])
    )
    .unwrap();
    let options = stub(&command::<EvaluationOptions>(), &EXCLUDED_FROM_EVALUATE);
    for (protocol, report) in [("str", "_Evaluation"), ("list[str] | tuple[str, ...]", "list[_Evaluation]")] {
        write!(
            lines,
            "    @overload\n    def evaluate(\n        self,\n        protocol: {protocol},\n        data: _Path | Sequence[_Path] | None = \
             None,\n        *,\n{options}        base: Model | None = None,\n    ) -> {report}: ...\n"
        )
        .unwrap();
    }
    expect_file("python/candle_gpt2/_native.pyi", |found| with_between(found, STUB, &lines));
}

#[test]
fn tokenize_stub_matches_its_options() {
    let ends =
        ["def tokenize(\n    data: _Path | Sequence[_Path],\n    out: _Path,\n    *,\n", "    model: _Path"];
    let options = stub(&command::<TokenizeOptions>(), &[]).replace("        ", "    ");
    expect_file("python/candle_gpt2/_native.pyi", |found| with_between(found, ends, &options));
}

/// Checks only the names, because types are written by hand: clap does not list a string's values.
#[test]
fn training_stub_lists_its_options() {
    expect_file("python/candle_gpt2/_native.pyi", |found| {
        let (_, rest) = found.split_once("class _TrainOptions(TypedDict, total=False):\n").unwrap();
        let lines = rest.lines().take_while(|line| !line.is_empty());
        let mut names: Vec<_> = lines.map(|line| line.trim().split(':').next().unwrap()).collect();
        let command = command::<TrainOptions>();
        // `resume` is a keyword of the method, and `n_head` is an option of every checkpoint.
        let mut expected: Vec<_> =
            options(&command, &["resume"]).map(name).chain(["n_head".into()]).collect();
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
        found.to_owned()
    });
}

/// Returns a title and a table of options.
fn section(title: &str, command: &Command) -> String {
    let mut text = format!("\n## {title}\n\n| option | default | |\n|---|---|---|\n");
    for option in command.get_arguments() {
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        let (what, default) = help.split_once(" [default: ").unwrap_or((&help, ""));
        let default = match option.get_default_values().first() {
            Some(default) if !matches!(option.get_action(), ArgAction::SetTrue) => format!("{default:?}"),
            _ => default.trim_end_matches(']').to_owned(),
        };
        writeln!(text, "| `{}` | {} | {what} |", name(option), default.trim_matches('"')).unwrap();
    }
    text
}

#[test]
fn options_page_is_up_to_date() {
    let mut page = String::from(
        "# Options\n\n\
         The command line, Python, the server and the page share these options and their names: flags are `--kv-dtype`, keywords of Python\n\
         `kv_dtype` (`as_`, `from_` and `with_` end in an underscore there). The tables are generated from the code that checks the options. The\n\
         options of each view are in `gpt2 look VIEW --help`, `gpt2 cache --help`, and the signatures of Python's methods.\n\n\
         ## Defaults of generation\n\n\
         Generation options come from the checkpoint's `generation_config.json`, whose keys they are, else from the tables, with `do_sample` on:\n\
         without that file, at most 100 tokens are sampled at temperature 1 from the 50 most probable ones. Setting a sampling option turns\n\
         `do_sample` on, and a temperature of 0 turns it off.\n\n\
         Options with a range under \"HTTP\" are fields of requests. For the others, requests use OpenAI's names, which\n\
         [Serve over HTTP](../guides/serve.md#request-fields) lists. The server takes `max_new_tokens` and the groups Sampling and Logits\n\
         processors from the file, except `seed` and `num_return_sequences`, which each request sets: without a seed it uses a new one. It has no\n\
         beam or contrastive search, and a chat completion ends at the end of the context. `gpt2 serve --generation-config none` ignores the file.\n",
    );
    page += &generation_sections();
    for (title, command) in [
        ("Models", command::<ModelOptions>()),
        ("Evaluation", command::<EvaluationOptions>()),
        ("Training", command::<TrainOptions>()),
        ("Token files", command::<TokenizeOptions>()),
    ] {
        page += &section(title, &command);
    }
    expect_file("docs/src/reference/options.md", |_| page.clone());
}
