//! A page with mistakes, each of which is found in its line, and no other.

use std::path::Path;

use crate::{Problem, outputs, page, session};

const WRONG_WHEN_RUN: &str = r#"
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

const WRONG_AS_IT_STANDS: &str = r#"
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

/// Runs the page, which needs no program.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let lines = |problems: Vec<Problem>| problems.iter().map(|problem| problem.line).collect::<Vec<_>>();
    let found = page::steps(WRONG_AS_IT_STANDS).err().map(lines);
    assert_eq!(found, Some(vec![2, 9, 12, 20]));
    let steps = page::steps(WRONG_WHEN_RUN).unwrap_or_default();
    let (runs, _) = session::run(root, Path::new("/bin/sh"), &steps)?;
    let found = outputs::check(&steps, &runs).err().map(lines);
    assert_eq!(found, Some(vec![3, 5, 10, 36]));
    let rewritten = outputs::rewrite(WRONG_WHEN_RUN, &steps, &runs);
    assert_eq!(rewritten, WRONG_WHEN_RUN.replace("one\ntwo\n", "one\none\n").replace("]\ng\n", "]\nf\n"));
    Ok(())
}
