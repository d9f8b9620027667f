//! JSON Schema test suite: each group is handled correctly or rejected with a reason.

use std::collections::BTreeMap;
use std::fs;

use candle_gpt2_grammar::Grammar;
use candle_gpt2_testing::json_schema_tests;
use serde_json::Value;

use crate::json_schema::{Checker, escaped_spellings, spellings};

/// Names of the draft 2020-12 files that test the keywords supported by this project.
const SUPPORTED: &str = "additionalProperties allOf anyOf const dependentRequired enum exclusiveMaximum \
    exclusiveMinimum items maxItems maxLength maxProperties maximum minItems minLength minProperties minimum \
    multipleOf not oneOf pattern patternProperties prefixItems properties propertyNames ref required type \
    uniqueItems";
/// Number of groups in these files; later versions of the suite have more.
const GROUPS: usize = 202;
/// Maximum number of these groups that are rejected; lower this limit as support improves.
const MAX_REJECTED: usize = 61;

/// Whether a message names a keyword in the schema or reports that the schema is unsatisfiable.
fn gives_reason(schema: &Value, message: &str) -> bool {
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
fn every_group_is_correct_or_rejected_with_a_reason() {
    let Some(folder) = json_schema_tests() else { return };
    let checker = Checker::new();
    let mut files: Vec<_> = fs::read_dir(folder.join("tests/draft2020-12"))
        .expect("the tests of draft 2020-12")
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    let (mut groups, mut wrong) = (0_usize, Vec::new());
    let mut rejected: BTreeMap<String, String> = BTreeMap::new();
    for file in files {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let is_supported = SUPPORTED.split_whitespace().any(|supported| supported == name);
        let tests: Vec<Value> = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        for group in tests {
            groups += usize::from(is_supported);
            let schema = &group["schema"];
            let group_name = format!("{name}: {}", group["description"]);
            let constraint = match checker.compile(&Grammar::JsonSchema(schema.clone())) {
                Ok(constraint) => constraint,
                Err(message) => {
                    if !gives_reason(schema, &message) {
                        wrong.push(format!("{group_name}: rejected without a reason: {message}"));
                    }
                    if is_supported {
                        rejected.insert(group_name, message);
                    }
                    continue;
                }
            };
            for test in group["tests"].as_array().unwrap() {
                let (data, is_valid) = (&test["data"], test["valid"] == true);
                let accepted = if is_valid {
                    spellings(data).into_iter().find(|text| checker.accepts(&*constraint, text))
                } else {
                    let mut texts = spellings(data).into_iter().chain(escaped_spellings(data));
                    texts.find(|text| checker.accepts(&*constraint, text))
                };
                if accepted.is_some() != is_valid {
                    wrong.push(format!("{group_name}: {data} is valid: {is_valid}, accepted: {accepted:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(groups >= GROUPS, "found only {groups} groups");
    // Groups added in later versions may be unsupported.
    let new = groups - GROUPS;
    assert!(rejected.len() <= MAX_REJECTED + new, "{groups} groups: {rejected:#?}");
}
