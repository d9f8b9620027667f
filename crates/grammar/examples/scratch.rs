use std::time::Instant;
use gpt2_engine::*;
use gpt2_grammar::*;
use gpt2_generation::*;
fn rss() -> usize { let s = std::fs::read_to_string("/proc/self/status").unwrap(); s.lines().find(|l| l.starts_with("VmRSS")).unwrap().split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()/1024 }
fn main() {
    let o = ModelOptions { model: std::env::args().nth(1).unwrap().into(), ..Default::default() };
    let opened = o.open(&Silent).unwrap();
    let v = opened.vocabulary();
    let t = Instant::now();
    let c = Compiler::new(v).unwrap();
    println!("new {:?}", t.elapsed());
    let t = Instant::now();
    c.compile(&Grammar::Regex("abc".into()), &[50256]).unwrap();
    println!("first compile {:?} rss {} MB", t.elapsed(), rss());
    let eos = 50256u32;
    let deep = |n: usize| { let mut s = serde_json::json!({"type":"string"}); for _ in 0..n { s = serde_json::json!({"type":"object","properties":{"a":s},"required":["a"],"additionalProperties":false}); } s };
    let wide: serde_json::Map<String, serde_json::Value> = (0..3000).map(|i| (format!("key{i}"), serde_json::json!({"type":"string","pattern":"^[a-z]{3,9}@[0-9]+$"}))).collect();
    let cases: Vec<(&str, Grammar)> = vec![
        ("(a|aa)*", Grammar::Regex("(a|aa)*".into())),
        ("(a*)*b", Grammar::Regex("(a*)*b".into())),
        ("a{1,100000}", Grammar::Regex("a{1,100000}".into())),
        ("(a{1,1000}){1,1000}", Grammar::Regex("(a{1,1000}){1,1000}".into())),
        ("((a{1,100}){1,100}){1,100}", Grammar::Regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}".into())),
        (".*a.{20}", Grammar::Regex("(?s).*a.{20}".into())),
        ("\\w{1,500}", Grammar::Regex("\\w{1,500}".into())),
        ("x{0,50000}y", Grammar::Regex("(?:[a-c]x|y[^z]){0,50000}y".into())),
        ("nested parens", Grammar::Regex("(".repeat(100000))),
        ("nested parens closed", Grammar::Regex(format!("{}a{}", "(".repeat(60000), ")".repeat(60000)))),
        ("nested parens 200", Grammar::Regex(format!("{}a{}", "(a|".repeat(200), ")*".repeat(200)))),
        ("long literal", Grammar::Regex("abcdefgh".repeat(30000))),
        ("many alternatives", Grammar::Regex((0..20000).map(|i| format!("w{i}")).collect::<Vec<_>>().join("|"))),
        ("bad", Grammar::Regex("a(b".into())),
        ("lookahead", Grammar::Regex("a(?=b)".into())),
        ("backref", Grammar::Regex(r"(a)\1".into())),
        ("empty", Grammar::Regex("".into())),
        ("nothing", Grammar::Regex("[^\\s\\S]".into())),
        ("slash", Grammar::Regex("a/b".into())),
        ("anchors", Grammar::Regex("^abc$".into())),
        ("word boundary", Grammar::Regex("\\babc\\b".into())),
        ("deep 100", Grammar::JsonSchema(deep(100))),
        ("deep 1000", Grammar::JsonSchema(deep(1000))),
        ("wide", Grammar::JsonSchema(serde_json::json!({"type":"object","properties":wide}))),
        ("recursive", Grammar::JsonSchema(serde_json::json!({"$ref":"#"}))),
        ("recursive2", Grammar::JsonSchema(serde_json::json!({"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}))),
        ("recursive tree", Grammar::JsonSchema(serde_json::json!({"type":"object","properties":{"c":{"type":"array","items":{"$ref":"#"}}},"required":["c"],"additionalProperties":false}))),
        ("infinite tree", Grammar::JsonSchema(serde_json::json!({"type":"object","properties":{"c":{"$ref":"#"}},"required":["c"],"additionalProperties":false}))),
        ("remote", Grammar::JsonSchema(serde_json::json!({"$ref":"https://example.com/a.json"}))),
        ("remote file", Grammar::JsonSchema(serde_json::json!({"$ref":"file:///etc/passwd"}))),
        ("missing ref", Grammar::JsonSchema(serde_json::json!({"$ref":"#/$defs/x"}))),
        ("bad type", Grammar::JsonSchema(serde_json::json!({"type":"strin"}))),
        ("bad type nested", Grammar::JsonSchema(serde_json::json!({"type":"object","properties":{"a":{"type":"object","properties":{"b":{"type":7}}}}}))),
        ("unknown keyword", Grammar::JsonSchema(serde_json::json!({"type":"string","contains":3}))),
        ("not", Grammar::JsonSchema(serde_json::json!({"not":{"type":"string"}}))),
        ("unsat", Grammar::JsonSchema(serde_json::json!({"type":"integer","minimum":3,"maximum":2}))),
        ("false", Grammar::JsonSchema(serde_json::json!(false))),
        ("number", Grammar::JsonSchema(serde_json::json!(5))),
        ("maxLength 100000", Grammar::JsonSchema(serde_json::json!({"type":"string","maxLength":100000}))),
        ("maxItems 100000", Grammar::JsonSchema(serde_json::json!({"type":"array","items":{"type":"string"},"maxItems":100000}))),
        ("minItems 1e9", Grammar::JsonSchema(serde_json::json!({"type":"array","minItems":1000000000}))),
        ("multipleOf", Grammar::JsonSchema(serde_json::json!({"type":"number","multipleOf":0.0000001}))),
        ("multipleOf big", Grammar::JsonSchema(serde_json::json!({"type":"integer","multipleOf":1000003}))),
        ("pattern", Grammar::JsonSchema(serde_json::json!({"type":"string","pattern":"(a|aa)*b{1,100000}"}))),
        ("oneOf", Grammar::JsonSchema(serde_json::json!({"oneOf":[{"type":"string"},{"type":"string","maxLength":3}]}))),
        ("oneOf disjoint", Grammar::JsonSchema(serde_json::json!({"oneOf":[{"type":"string"},{"type":"integer"}]}))),
        ("allOf bomb", Grammar::JsonSchema(serde_json::json!({"allOf":(0..200).map(|i| serde_json::json!({"anyOf":[{"type":"object","properties":{format!("a{i}"):{"type":"string"}}},{"type":"object","properties":{format!("b{i}"):{"type":"string"}}}]})).collect::<Vec<_>>()}))),
        ("json object", Grammar::JsonObject),
        ("lark ok", Grammar::Lark("start: \"a\" | \"b\" start".into())),
        ("lark bad", Grammar::Lark("start: \"a\" | \n  foo".into())),
        ("lark syntax", Grammar::Lark("start: \"a\" (\n".into())),
        ("lark no start", Grammar::Lark("foo: \"a\"".into())),
        ("lark empty", Grammar::Lark("".into())),
        ("lark nested", Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(50000), ")".repeat(50000)))),
        ("lark left rec", Grammar::Lark("start: start \"a\" | \"a\"".into())),
        ("lark ambiguous", Grammar::Lark("start: start start | \"a\" | \"\"".into())),
        ("lark special", Grammar::Lark("start: <|endoftext|> \"a\"".into())),
        ("lark number token", Grammar::Lark("start: <[5]> \"a\"".into())),
        ("lark any token", Grammar::Lark("start: <[*]> \"a\"".into())),
        ("lark stop", Grammar::Lark("start: a\na[stop=\"x\"]: /.*/".into())),
        ("lark suffix", Grammar::Lark("start: a\na[suffix=\"x\"]: /.*/".into())),
        ("lark stop eos", Grammar::Lark("start: a\na[stop=\"\"]: /.*/".into())),
        ("lark json", Grammar::Lark("start: \"x\" %json {\"type\":\"object\"}".into())),
        ("lark repeat", Grammar::Lark("start: (\"a\" | \"b\")~1..100000000".into())),
        ("lark repeat2", Grammar::Lark("start: ((\"a\" | b)~1..1000)~1..1000\nb: \"c\" b | \"d\"".into())),
        ("lark import", Grammar::Lark("%import /etc/passwd\nstart: \"a\"".into())),
        ("lark nested braces", Grammar::Lark(format!("start: %lark {}", "{ start: %lark ".repeat(10000)))),
        ("lark many rules", Grammar::Lark(format!("start: {}\n{}", (0..9000).map(|i| format!("r{i}")).collect::<Vec<_>>().join(" | "), (0..9000).map(|i| format!("r{i}: \"a{i}\"\n")).collect::<String>()))),
        ("lark exp", Grammar::Lark(format!("start: a0\n{}a40: \"x\"\n", (0..40).map(|i| format!("a{i}: a{} a{}\n", i+1, i+1)).collect::<String>()))),
        ("lark exp terminals", Grammar::Lark(format!("start: A0\n{}A40: \"x\"\n", (0..40).map(|i| format!("A{i}: A{} A{}\n", i+1, i+1)).collect::<String>()))),
        ("lark rec terminal", Grammar::Lark("start: A\nA: \"x\" A\n".into())),
        ("lark deep epsilon", Grammar::Lark(format!("start: a0\n{}a5000: \"x\"\n", (0..5000).map(|i| format!("a{i}: a{} |\n", i+1)).collect::<String>()))),
        ("lark substring", Grammar::Lark(format!("start: %regex {{ \"substring_chars\": \"{}\" }}", "abcdefghij".repeat(20000)))),
        ("lark and not", Grammar::Lark("start: A\nA: /.*a.{15}/ & /.*b.{14}/ & ~/.*c.{13}/\n".into())),
    ];
    let only = std::env::args().nth(2);
    for (name, g) in cases {
        if only.as_ref().is_some_and(|o| o != name) { continue; }
        let before = rss();
        let t = Instant::now();
        let p = c.compile(&g, &[eos]);
        let took = t.elapsed();
        let mut line = format!("{name}: {took:?} +{} MB ", rss() as i64 - before as i64);
        match &p {
            Err(e) => { let e = e.to_string(); line += &format!("ERR {}", e.replace('\n', "⏎").chars().take(300).collect::<String>()) }
            Ok(LogitsProcessor::Constraint(k)) => {
                let mut ids = vec![]; let mut rng = 12345u64; let mut worst = std::time::Duration::ZERO; let mut total = worst; let mut why = "max".to_string(); let mut n=0;
                for _ in 0..300 {
                    let mut a = vec![false; 50257];
                    let t = Instant::now();
                    match k.allow(&ids, &mut a) { Err(e) => { why = e.to_string(); break; } Ok(()) => {} }
                    let d = t.elapsed(); total += d; worst = worst.max(d); n+=1;
                    let opts: Vec<u32> = a.iter().enumerate().filter(|x| *x.1).map(|x| x.0 as u32).collect();
                    if opts.is_empty() { why = format!("none left, complete {:?}", k.is_complete(&ids)); break; }
                    rng = rng.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let id = opts[(rng >> 33) as usize % opts.len()];
                    ids.push(id);
                    if id == eos { why = "eos".into(); break; }
                }
                let bytes: Vec<u8> = ids.iter().filter(|i| **i != eos).flat_map(|i| v.token_bytes(*i)).collect();
                line += &format!("ok; {n} tokens mean {:?} worst {worst:?} rss {} end {why}: {:?}", total / n.max(1), rss(), String::from_utf8_lossy(&bytes).chars().take(100).collect::<String>());
            }
            _ => {}
        }
        println!("{line}");
    }
}
