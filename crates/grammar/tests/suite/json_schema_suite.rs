//! The JSON Schema test suite: each group is generated right or refused by name.

use std::collections::BTreeMap;
use std::fs;

use candle_gpt2_grammar::Grammar;
use candle_gpt2_testing::json_schema_tests;
use serde_json::Value;

use crate::json_schema::{Reader, escaped_spellings, spellings};

/// Groups of draft 2020-12 in the files for the keywords that this project names.
const GROUPS: usize = 202;
/// Groups that may be refused. Fewer is progress; more is a regression.
const MOST_REFUSED: usize = 61;

/// What a message must contain to name the reason of a refusal: a keyword of the schema, or that nothing fulfills it.
fn is_named(schema: &Value, message: &str) -> bool {
    fn keywords(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(members) => members.iter().for_each(|(key, member)| {
                found.push(key.clone());
                keywords(member, found);
            }),
            Value::Array(items) => items.iter().for_each(|item| keywords(item, found)),
            _ => {}
        }
    }
    let mut found = vec!["Unsatisfiable".to_owned(), "allows nothing".into(), "patternProperty".into()];
    keywords(schema, &mut found);
    found.iter().any(|keyword| message.contains(keyword.as_str()))
}

#[test]
fn each_group_is_right_or_refused_by_name() {
    let Some(folder) = json_schema_tests() else { return };
    let reader = Reader::new();
    let mut files: Vec<_> = fs::read_dir(folder.join("tests/draft2020-12"))
        .expect("the tests of draft 2020-12")
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    let (mut groups, mut wrong) = (0, Vec::new());
    let mut refused: BTreeMap<String, String> = BTreeMap::new();
    for file in files {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let tests: Vec<Value> = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        for group in tests {
            groups += 1;
            let schema = &group["schema"];
            let group_name = format!("{name}: {}", group["description"]);
            let constraint = match reader.compile(&Grammar::JsonSchema(schema.clone())) {
                Ok(constraint) => constraint,
                Err(message) => {
                    if !is_named(schema, &message) {
                        wrong.push(format!("{group_name}: refused without a name: {message}"));
                    }
                    refused.insert(group_name, message);
                    continue;
                }
            };
            for test in group["tests"].as_array().unwrap() {
                let (data, is_valid) = (&test["data"], test["valid"] == true);
                let accepted = if is_valid {
                    spellings(data).into_iter().find(|text| reader.accepts(&*constraint, text))
                } else {
                    let mut texts = spellings(data).into_iter().chain(escaped_spellings(data));
                    texts.find(|text| reader.accepts(&*constraint, text))
                };
                if accepted.is_some() != is_valid {
                    wrong.push(format!("{group_name}: {data} is valid: {is_valid}, accepted: {accepted:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let is_other_suite = groups > GROUPS;
    assert!(
        groups >= GROUPS && (is_other_suite || refused.len() <= MOST_REFUSED),
        "{groups} groups: {refused:#?}"
    );
}
