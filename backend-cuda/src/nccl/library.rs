//! libnccl, opened at run time.
//!
//! cudarc has the library's types. Its loader does not look for `libnccl.so.2`, the only name that
//! most installations have, and panics where a symbol is missing, so this one is ours.

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::OnceLock,
};

/// What the library answers. A number: a later version may have codes that are not known here.
pub(super) type Code = c_int;
/// Done.
pub(super) const SUCCESS: Code = 0;
/// Being done; ask again.
pub(super) const IN_PROGRESS: Code = 7;

/// The oldest version that has everything used here (`ncclCommSplit` came last).
const OLDEST: u32 = 21800;

/// What went wrong below the level of tensors.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library is not there.
    #[error("libnccl was not found ({tried}): {}", INSTALL)]
    NotFound {
        /// What the system said to each name.
        tried: String,
    },
    /// The library lacks a function.
    #[error("libnccl {} has no {name}: {}", version_text(*version), INSTALL)]
    Symbol {
        /// The function.
        name: &'static str,
        /// The library's version.
        version: u32,
    },
    /// The library is too old.
    #[error("libnccl {} is older than {}: {}", version_text(*version), version_text(*needed), INSTALL)]
    TooOld {
        /// The library's version.
        version: u32,
        /// The oldest one that does.
        needed: u32,
    },
    /// A call of the library failed.
    #[error("{call}: {meaning}{}", if detail.is_empty() { String::new() } else { format!(" ({detail})") })]
    Call {
        /// The function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// What that means.
        meaning: String,
        /// The library's last message.
        detail: String,
    },
    /// A call of the driver failed.
    #[error("{call}: {detail}")]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's words.
        detail: String,
    },
    /// Others did not come in time.
    #[error("{what} was not done within {seconds} s")]
    Late {
        /// What was waited for.
        what: &'static str,
        /// The deadline.
        seconds: f64,
    },
    /// The communicators were given up before.
    #[error(transparent)]
    GivenUp(anymesh_kernel::Error),
    /// The device does not have what is asked for.
    #[error(transparent)]
    Device(#[from] anymesh_kernel::Error),
}

/// What to do about a missing or old library.
const INSTALL: &str = "install NCCL 2.18 or newer (package libnccl2, or pip's nvidia-nccl-cu12 or -cu13) and put its folder on LD_LIBRARY_PATH, or use another transport";

/// Version 22803 is 2.28.3.
pub fn version_text(version: u32) -> String {
    format!(
        "{}.{}.{}",
        version / 10000,
        version / 100 % 100,
        version % 100
    )
}

impl From<Error> for anymesh_kernel::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::NotFound { .. } | Error::Symbol { .. } | Error::TooOld { .. } => {
                let text = error.to_string();
                let (reason, hint) = text.split_once(": install").unwrap_or((&text, ""));
                Self::DeviceUnavailable {
                    device: "nccl".into(),
                    reason: reason.into(),
                    hint: format!("install{hint}"),
                }
            }
            Error::Late { what, seconds } => Self::Timeout {
                op: what,
                seconds,
                missing: [].into(),
                detail: "; NCCL does not tell who is missing".into(),
            },
            Error::GivenUp(error) | Error::Device(error) => error,
            Error::Call { call, .. } | Error::Driver { call, .. } => Self::Transport {
                op: call,
                detail: format!("NCCL: {error}"),
                ranks: vec![],
            },
        }
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $answer:ty;)*) => {
        /// The functions used here.
        #[allow(non_snake_case)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        impl Functions {
            /// # Safety
            /// The library must be libnccl.
            unsafe fn load(library: &libloading::Library, version: u32) -> Result<Self, Error> {
                Ok(Self {
                    // SAFETY: the signatures are those of the library's header.
                    $($name: unsafe { symbol(library, stringify!($name), version) }?,)*
                })
            }
        }
    };
}

functions! {
    ncclGetUniqueId(*mut ncclUniqueId) -> Code;
    ncclCommInitRankConfig(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code;
    ncclCommSplit(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t) -> Code;
    ncclCommFinalize(ncclComm_t) -> Code;
    ncclCommDestroy(ncclComm_t) -> Code;
    ncclCommAbort(ncclComm_t) -> Code;
    ncclCommGetAsyncError(ncclComm_t, *mut Code) -> Code;
    ncclCommUserRank(ncclComm_t, *mut c_int) -> Code;
    ncclCommCount(ncclComm_t, *mut c_int) -> Code;
    ncclGetErrorString(Code) -> *const c_char;
    ncclGetLastError(ncclComm_t) -> *const c_char;
    ncclGroupStart() -> Code;
    ncclGroupEnd() -> Code;
    ncclAllReduce(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void) -> Code;
    ncclAllGather(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, *mut c_void) -> Code;
    ncclReduceScatter(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void) -> Code;
    ncclBroadcast(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> Code;
    ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> Code;
    ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> Code;
}

/// # Safety
/// `F` must be the function's type.
unsafe fn symbol<F: Copy>(
    library: &libloading::Library,
    name: &'static str,
    version: u32,
) -> Result<F, Error> {
    // SAFETY: as above.
    unsafe { library.get::<F>(name.as_bytes()) }
        .map(|f| *f)
        .map_err(|_| Error::Symbol { name, version })
}

/// The library, once it is open.
pub struct Library {
    pub(super) call: Functions,
    version: u32,
    /// The functions are its own.
    _library: libloading::Library,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NCCL {}", version_text(self.version))
    }
}

impl Library {
    /// Opens it, once in a process.
    pub fn open() -> Result<&'static Self, Error> {
        static OPEN: OnceLock<Result<Library, Error>> = OnceLock::new();
        OPEN.get_or_init(Self::load).as_ref().map_err(Error::clone)
    }

    fn load() -> Result<Self, Error> {
        let mut tried = vec![];
        for name in ["libnccl.so.2", "libnccl.so", "nccl.dll"] {
            // SAFETY: the library's initialisers are trusted as those of the driver are.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Self::of(library),
                Err(e) => tried.push(e.to_string()),
            }
        }
        Err(Error::NotFound {
            tried: tried.join("; "),
        })
    }

    fn of(library: libloading::Library) -> Result<Self, Error> {
        let mut version: c_int = 0;
        // SAFETY: the signature is that of the library's header.
        let code = unsafe {
            let get: unsafe extern "C" fn(*mut c_int) -> Code =
                symbol(&library, "ncclGetVersion", 0)?;
            get(&mut version)
        };
        let version = version.max(0) as u32;
        if code != SUCCESS || version < OLDEST {
            return Err(Error::TooOld {
                version,
                needed: OLDEST,
            });
        }
        Ok(Self {
            // SAFETY: a library with `ncclGetVersion` is libnccl.
            call: unsafe { Functions::load(&library, version) }?,
            version,
            _library: library,
        })
    }

    /// Such as 22803 for 2.28.3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// An answer that is neither success nor being done is an error, with the library's words.
    /// `comm` may be null.
    pub(super) fn check(
        &self,
        call: &'static str,
        code: Code,
        comm: ncclComm_t,
    ) -> Result<(), Error> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both give texts that are never freed, or null.
        let (meaning, detail) = unsafe {
            (
                text((self.call.ncclGetErrorString)(code)),
                text((self.call.ncclGetLastError)(comm)),
            )
        };
        Err(Error::Call {
            call,
            code,
            meaning,
            detail,
        })
    }

    /// Makes calls as one: they start together and cannot wait for each other. The group ends
    /// whatever happens in it.
    pub(super) fn group<T>(&self, f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let none = std::ptr::null_mut();
        // SAFETY: a group belongs to this thread, and ends below.
        self.check(
            "ncclGroupStart",
            unsafe { (self.call.ncclGroupStart)() },
            none,
        )?;
        struct End<'a>(&'a Library, bool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                if !self.1 {
                    // SAFETY: as below; only after a panic.
                    unsafe { (self.0.call.ncclGroupEnd)() };
                }
            }
        }
        let mut end = End(self, false);
        let made = f();
        end.1 = true;
        // SAFETY: ends the group that was started above.
        let code = unsafe { (self.call.ncclGroupEnd)() };
        let made = made?;
        self.check("ncclGroupEnd", code, none)?;
        Ok(made)
    }
}

/// # Safety
/// Null or a text that ends with a zero.
unsafe fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(at) }
        .to_string_lossy()
        .trim()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_old_library_says_what_to_install() {
        let old = Error::TooOld {
            version: 21703,
            needed: OLDEST,
        };
        let missing = Error::NotFound {
            tried: "libnccl.so.2: no such file".into(),
        };
        let symbol = Error::Symbol {
            name: "ncclCommSplit",
            version: 21800,
        };
        for (error, reason) in [
            (old, "libnccl 2.17.3 is older than 2.18.0"),
            (
                missing,
                "libnccl was not found (libnccl.so.2: no such file)",
            ),
            (symbol, "libnccl 2.18.0 has no ncclCommSplit"),
        ] {
            let told = anymesh_kernel::Error::from(error);
            let anymesh_kernel::Error::DeviceUnavailable {
                reason: got, hint, ..
            } = &told
            else {
                panic!("{told}");
            };
            assert_eq!(got, reason);
            assert!(hint.starts_with("install NCCL 2.18"), "{hint}");
        }
    }

    #[test]
    fn without_the_library_opening_it_is_a_typed_error() {
        match Library::open() {
            Ok(library) => assert!(library.version() >= OLDEST),
            Err(e) => assert!(
                matches!(e, Error::NotFound { .. } | Error::TooOld { .. }),
                "{e}"
            ),
        }
    }
}
