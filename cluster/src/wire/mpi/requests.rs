//! Calls of MPI that have begun and are not yet complete.
#![allow(unsafe_code)]

use super::library::{Trouble, World, check, text_of};
use mpi::ffi;
use std::{ffi::c_int, fmt};

/// What went wrong with one message.
#[derive(Debug)]
pub(super) enum Fault {
    /// It is longer than the memory for it.
    Long,
    Other(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Long => f.write_str("a message is longer than the memory for it"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// Requests by number, in the order in which they were added.
#[derive(Default)]
pub(super) struct Requests {
    /// Null once complete.
    handles: Vec<ffi::MPI_Request>,
    /// Which of them MPI says are complete; as long as `handles`.
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
    open: usize,
}

impl Requests {
    /// How many are not complete.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// Which are not complete.
    pub(super) fn incomplete(&self) -> impl Iterator<Item = usize> {
        // SAFETY: a constant of the MPI library.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        (0..self.handles.len()).filter(move |i| self.handles[*i] != null)
    }

    /// What `begin` begins.
    pub(super) fn add(
        &mut self,
        call: &'static str,
        begin: impl FnOnce(&mut ffi::MPI_Request) -> c_int,
    ) -> Result<(), Trouble> {
        // SAFETY: a constant of the MPI library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        check(call, begin(&mut request))?;
        self.handles.push(request);
        self.indices.push(0);
        // SAFETY: a plain struct of integers, for which zeros are values.
        self.statuses.push(unsafe { std::mem::zeroed() });
        self.open += 1;
        Ok(())
    }

    /// Sends bytes to a rank of the world.
    ///
    /// # Safety
    /// They stay where they are and as they are until the request is complete, for ever if it
    /// never is.
    pub(super) unsafe fn send(
        &mut self,
        world: &World,
        bytes: *const [u8],
        to: c_int,
        tag: c_int,
    ) -> Result<(), Trouble> {
        // SAFETY: the caller keeps the bytes; rank, tag and communicator are checked by MPI.
        self.add("MPI_Isend", |request| unsafe {
            ffi::MPI_Isend(
                bytes.cast(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                to,
                tag,
                world.comm(),
                request,
            )
        })
    }

    /// Receives at most so many bytes from a rank of the world.
    ///
    /// # Safety
    /// The memory stays and is not looked at until the request is complete, for ever if it never
    /// is.
    pub(super) unsafe fn receive(
        &mut self,
        world: &World,
        memory: *mut [u8],
        from: c_int,
        tag: c_int,
    ) -> Result<(), Trouble> {
        // SAFETY: the caller keeps the memory; rank, tag and communicator are checked by MPI.
        self.add("MPI_Irecv", |request| unsafe {
            ffi::MPI_Irecv(
                memory.cast(),
                memory.len() as c_int,
                ffi::RSMPI_UINT8_T,
                from,
                tag,
                world.comm(),
                request,
            )
        })
    }

    /// Lets MPI work, and tells of every request that has become complete its number and how many
    /// bytes it received (of one that sends, any number).
    pub(super) fn test(
        &mut self,
        mut done: impl FnMut(usize, Result<usize, Fault>),
    ) -> Result<(), Trouble> {
        if self.open == 0 {
            return Ok(());
        }
        let mut count: c_int = 0;
        // SAFETY: the three arrays are as long as the number that is passed.
        let code = unsafe {
            ffi::MPI_Testsome(
                self.handles.len() as c_int,
                self.handles.as_mut_ptr(),
                &mut count,
                self.indices.as_mut_ptr(),
                self.statuses.as_mut_ptr(),
            )
        };
        let in_statuses = code as u32 == ffi::MPI_ERR_IN_STATUS;
        if !in_statuses {
            check("MPI_Testsome", code)?;
        }
        // MPI_UNDEFINED, a negative number, if there is nothing to wait for.
        for k in 0..count.max(0) as usize {
            let error = if in_statuses {
                self.statuses[k].MPI_ERROR
            } else {
                ffi::MPI_SUCCESS as c_int
            };
            self.open -= 1;
            done(self.indices[k] as usize, outcome(&self.statuses[k], error));
        }
        Ok(())
    }

    /// Takes back what has not begun to arrive. What MPI may still read or write stays its own.
    pub(super) fn abandon(&mut self, receives: impl Fn(usize) -> bool) {
        // SAFETY: a constant of the MPI library.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        for (i, handle) in self.handles.iter_mut().enumerate() {
            if *handle != null && receives(i) {
                // Sends cannot be taken back: MPI would have to ask the other end.
                // SAFETY: an open request of ours; errors change nothing about leaving it behind.
                unsafe {
                    ffi::MPI_Cancel(handle);
                    ffi::MPI_Request_free(handle);
                }
            }
        }
        self.open = 0;
    }
}

fn outcome(status: &ffi::MPI_Status, error: c_int) -> Result<usize, Fault> {
    if error as u32 == ffi::MPI_SUCCESS {
        let mut count: c_int = 0;
        // SAFETY: a status that MPI has filled, and a valid place.
        let code = unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut count) };
        return check("MPI_Get_count", code)
            .map(|()| count.max(0) as usize)
            .map_err(|e| Fault::Other(e.to_string()));
    }
    let mut class: c_int = 0;
    // SAFETY: a valid place.
    unsafe { ffi::MPI_Error_class(error, &mut class) };
    match class as u32 {
        ffi::MPI_ERR_TRUNCATE => Err(Fault::Long),
        _ => Err(Fault::Other(text_of(error))),
    }
}
