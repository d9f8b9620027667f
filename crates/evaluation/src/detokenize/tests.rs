//! Tests against the original Python functions, which produced the right column of each table.

use super::{capitalized, count_words, hellaswag, strip, wikitext};

#[track_caller]
fn assert_table(function: impl Fn(&str) -> String, table: &[(&str, &str)]) {
    for (text, expected) in table {
        assert_eq!(function(text), *expected, "of {text:?}");
    }
}

#[test]
fn wikitext_pages_are_detokenized() {
    assert_table(
        wikitext,
        &[
            ("the girls ' school , the boys '", "the girls'school, the boys'"),
            ("a well @-@ known 1 @,@ 234 @.@ 5 km", "a well-known 1,234.5 km"),
            (
                "first : second ; third . fourth ! fifth ? sixth , end",
                "first: second; third. fourth! fifth? sixth, end",
            ),
            ("end . . twice", "end. . twice"),
            ("( inside ) and (  two\n lines  ) ( open", "(inside) and (two\nlines) ( open"),
            ("( a ( b ) c )", "(a ( b) c )"),
            ("( ) (  )", "() ()"),
            ("[ x ] { y } [\ta b\u{a0}]", "[x] {y} [a b]"),
            ("he said \" yes \" and \" no", "he said \"yes\" and \" no"),
            ("it ' s ' quoted ' here", "it's' quoted ' here"),
            (
                " = = Title = = \n = = = Sub = = = \n = = = = Deep = = = = ",
                " == Title ==\n=== Sub ===\n==== Deep ==== ",
            ),
            (" = = = = = ", " ===== "),
            ("20 ° C and 3 °", "20°C and 3 °"),
            ("line \n next\n  third", "line\nnext\n third"),
            ("page N of N N end", "page 1 of 1 N end"),
            ("Tom 's cat 's", "Tom's cat's"),
            ("/' 5/ and /' x/ /' 12/ /' 7/", "/'[0-9]/ and /' x/ /'12/ /'[0-9]/"),
            ("?/' 5/' ./", "?/'[0-9]/' ./"),
            ("/' 5/' 5/ /' /' 7/' 8/", "/'[0-9]/' 5/ /'/'[0-9]/' 8/"),
            ("a\u{1c}( \u{1f} b \u{85})\u{3000}", "a\u{1c}(b)\u{3000}"),
            ("' '' '", "''''"),
            ("s 's '", "s's'"),
            ("\n \n text \n \n", "\n\ntext\n\n"),
            (" N N ", " 1 N "),
            ("\"\"  \" a \"", "\"\"  \"a\""),
            ("( \u{200b} a )", "(\u{200b} a)"),
            ("", ""),
        ],
    );
}

#[test]
fn wikihow_markup_is_removed() {
    assert_table(
        hellaswag,
        &[
            ("  Making tea [title] Boil water. [step] Pour  it.  ", "Making tea. Boil water. Pour it."),
            ("[header] How to sew [title] Thread a needle.", " How to sew. Thread a needle."),
            ("a [b] c [ d\n e ] f", "a c [ d\n e ] f"),
            ("[x]] [[y] z", "] z"),
            ("three   spaces    four", "three  spaces  four"),
            ("[unclosed", "[unclosed"),
            ("no marks", "no marks"),
            ("\u{1f} [title]x", "x"),
            ("a [title] [title] b", "a. . b"),
            ("[a]  [b]", " "),
        ],
    );
}

#[test]
fn capitalization_matches_python() {
    assert_table(
        capitalized,
        &[
            ("", ""),
            ("hello World", "Hello world"),
            ("HELLO", "Hello"),
            ("ßtraße", "Sstraße"),
            ("ﬁRE", "Fire"),
            ("ǆungla", "ǅungla"),
            ("ΑΣ", "Ας"),
            ("Σ", "Σ"),
            ("ΟΔΟΣ ΣΑΣ", "Οδος σας"),
            ("ŉabc", "ʼNabc"),
            ("ᾳΒ", "ᾼβ"),
            ("ᾀΒ", "ᾈβ"),
            ("ᾲx", "Ὰ\u{345}x"),
            ("აბგ", "აბგ"),
            ("éCOLE", "École"),
            ("1ST Place", "1st place"),
            (" leading", " leading"),
            ("İstanbul", "İstanbul"),
            ("ΐ", "Ι\u{308}\u{301}"),
            ("և", "Եւ"),
            ("ᾼX", "ᾼx"),
            ("ῷΣ", "Ω\u{342}\u{345}ς"),
        ],
    );
}

#[test]
fn word_count_includes_empty_parts_at_the_edges() {
    let table = [
        ("", 1),
        ("one", 1),
        (" ", 2),
        ("two words", 2),
        (" edge\n\nedges\t", 4),
        ("a\u{1c}b\u{a0}c\u{200b}d", 3),
        ("  x", 2),
    ];
    for (text, expected) in table {
        assert_eq!(count_words(text), expected, "of {text:?}");
    }
}

#[test]
fn strip_matches_python() {
    assert_eq!(strip("\u{1f}\u{a0} x y\u{200b} \u{2028}"), "x y\u{200b}");
}
