//! Self-test with faulty pages: each mistake must be reported at its line, and nothing else.

use std::path::Path;

use crate::{Problem, outputs, page, session};

const RUNTIME_MISTAKES: &str = r#"
```console
$ echo one
two
$ false
$ printf 'a\nb\nc\nd\n'
a
...
d
$ printf 'e\nf\n'
[..]
g
$ (exit 3)
$ echo $?
3
$ cat <<END
> more
> END
more
```

- in a list

  ```sh
  here=4
  cd /
  ```

```console
$ echo "$here" && pwd
4
/
```

```sh
true
ls nothing
```

```console
$ echo "the session has ended"
```
"#;

const STATIC_MISTAKES: &str = r#"
```bash
```

<!-- not run: needs a GPU -->
```sh,no_run
```

```sh,no_run
```

```json
{"a": }
```

```toml
a = 1
```

    indented
"#;

/// Checks the reported lines. The test pages do not need the program.
pub(crate) fn check() -> Result<(), String> {
    let lines = |problems: Vec<Problem>| problems.iter().map(|problem| problem.line).collect::<Vec<_>>();
    let found = page::steps(STATIC_MISTAKES).err().map(lines);
    assert_eq!(found, Some(vec![2, 9, 12, 20]));
    let steps = page::steps(RUNTIME_MISTAKES).unwrap_or_default();
    let (runs, _) = session::run(Path::new("/bin/sh"), &steps)?;
    let found = outputs::check(&steps, &runs).err().map(lines);
    assert_eq!(found, Some(vec![3, 5, 10, 36]));
    let rewritten = outputs::rewrite(RUNTIME_MISTAKES, &steps, &runs);
    assert_eq!(rewritten, RUNTIME_MISTAKES.replace("one\ntwo\n", "one\none\n").replace("]\ng\n", "]\nf\n"));
    Ok(())
}
