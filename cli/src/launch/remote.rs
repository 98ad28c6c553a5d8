//! A process on another host, by ssh.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
    process::Command,
};

/// What runs there. Its standard input is the line to `launch`: the token first, where `ps` does
/// not show it, then names of signals. When the line is cut, by whatever ended `launch` or the
/// network, the processes there are killed.
const SCRIPT: &str = r#"
cd -- "$1" || exit 126
shift
IFS= read -r ANYMESH_TOKEN || exit 126
export ANYMESH_TOKEN
exec 3<&0
if command -v setsid >/dev/null 2>&1
then setsid env "$@" </dev/null 3<&- &
else env "$@" </dev/null 3<&- &
fi
child=$!
send() { kill -s "$1" -- "-$child" 2>/dev/null || kill -s "$1" "$child" 2>/dev/null; }
(while read -r name; do send "$name"; done; send KILL) <&3 3<&- >/dev/null 2>&1 &
watcher=$!
exec 3<&-
{ wait "$child"; code=$?; } 2>/dev/null
{ kill -s KILL "$watcher"; wait "$watcher"; } 2>/dev/null
kill -s 0 -- "-$child" 2>/dev/null && sleep 1 && kill -s KILL -- "-$child" 2>/dev/null
exit "$code"
"#;

/// Text as any shell reads it as one word.
fn quoted(text: &OsStr) -> Vec<u8> {
    let mut out = vec![b'\''];
    for &byte in text.as_bytes() {
        match byte {
            b'\'' => out.extend(br"'\''"),
            _ => out.push(byte),
        }
    }
    out.push(b'\'');
    out
}

/// The command that starts `program` in `folder` on a host.
pub(super) fn command(
    host: &str,
    folder: &Path,
    variables: &[(OsString, OsString)],
    program: &[OsString],
) -> Command {
    let mut words: Vec<Vec<u8>> = vec![b"exec sh -c".to_vec(), quoted(OsStr::new(SCRIPT))];
    words.push(b"sh".to_vec());
    words.push(quoted(folder.as_os_str()));
    for (name, value) in variables {
        let mut both = name.clone();
        both.push("=");
        both.push(value);
        words.push(quoted(&both));
    }
    words.extend(program.iter().map(|word| quoted(word)));
    let mut command = Command::new("ssh");
    // A question for a password would wait for ever.
    command.args(["-T", "-o", "BatchMode=yes", "--", host]);
    command.arg(OsString::from_vec(words.join(&b' ')));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        let hard = "a'b \"$HOME\" `x` \\ \n;";
        let out = Command::new("sh")
            .arg("-c")
            .arg(OsString::from_vec(
                [b"printf %s ".to_vec(), quoted(OsStr::new(hard))].concat(),
            ))
            .output()
            .unwrap();
        assert_eq!(out.stdout, hard.as_bytes());
    }
}
