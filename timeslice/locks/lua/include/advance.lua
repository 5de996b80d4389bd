-- The promotion: who is next, and what has to happen first. Needs group, waiters, residency, lease.
-- In reasons, @<ms> stands for a time of the server's clock; readers format it.

local NO_COORDINATOR = 'no coordinator drives the swap'
local NO_AGENT = 'no agent serves this group'
local residency_now -- read once a script

-- A node that has yet to tell what is on its devices, as a reason; nil if there is none.
local function unheard_node()
  if S.unheard ~= '' then
    return 'node ' .. string.match(S.unheard, '%S+') .. ' joined and has not yet told what is on its devices'
  end
end

-- Why nothing can be moved on some node, or nil.
local function silent_node()
  local silent = redis.call('ZRANGE', nodes_key, 0, 0, 'WITHSCORES')
  if not silent[1] then
    return NO_AGENT
  end
  if tonumber(silent[2]) < now then
    return 'node ' .. silent[1] .. ' unreachable since @' .. silent[2]
  end
end

-- Whether some job needs nothing moved to go on.
local function in_place(residency)
  for _, where in pairs(residency) do
    if where == 'resident' or where == 'unknown' then
      return true
    end
  end
  return false
end

-- Returns 'grant', how | 'swap' | 'blocked', reason, true if no other job fares better; for a job that wants in now.
local function decide(job)
  if S.mode == 'lock' then
    return 'grant', 'no-op'
  end
  if S.mode ~= 'served' then
    return 'blocked', NO_AGENT, true
  end
  local unheard = unheard_node()
  if unheard then
    return 'blocked', unheard, true
  end
  residency_now = residency_now or residency_of_jobs()
  local crowded = S.evict ~= ''
  for other, where in pairs(residency_now) do
    if where == 'faulted' then
      return 'blocked', 'the device state of job ' .. other .. ' is unknown', true
    end
    if where == 'unknown' and other ~= job then
      return 'blocked', doubt_about(other), false -- that job itself may go on
    end
    if other ~= job and not OUT[where] then
      crowded = true
    end
  end
  local mine = residency_now[job] or ''
  -- Where nobody can see a job, nobody but the job has moved it either: it finds what it left.
  if not crowded and (mine == 'resident' or mine == 'unknown' and not is_saved(job)) then
    return 'grant', 'no-op'
  end
  if mine == 'unknown' and S.evict == job then
    return 'blocked', doubt_about(job), true
  end
  local silent = silent_node()
  if silent then
    return 'blocked', silent, not in_place(residency_now)
  end
  if (mine == '' or mine == 'absent' or mine == 'gone') and not crowded then
    return 'grant', 'first load'
  end
  return 'swap'
end

-- A swap that nobody drives says so.
local function show_swap()
  if S.owner == '' or S.owner_deadline_ms < now then
    set_phase('blocked', NO_COORDINATOR)
  elseif S.phase ~= 'blocked' or S.reason == NO_COORDINATOR then
    set_phase('swapping', '')
  end
end

local function start_swap(waiter, job)
  set('swap_id', draw())
  set('swap_waiter', waiter)
  set('swap_job', job)
  set('swap_step', 'new')
  set('swap_since_ms', now)
  set('swap_budget_ms', OWNER_MS)
  set('swap_deadline_ms', now + OWNER_MS)
  set('plan', '')
  set_phase('swapping', '')
  show_swap()
  emit('SwapStarted', 'swap', digits(S.swap_id), 'job', job, 'waiter', waiter, 'evict', S.evict)
  wake('swap')
end

-- Why the device can't be cleared now, or nil; and whether that is a job which nobody can see.
local function clearing_obstacle()
  for job, where in pairs(residency_of_jobs()) do
    if where == 'faulted' then
      return 'the device state of job ' .. job .. ' is unknown'
    elseif where == 'unknown' then
      return doubt_about(job), true
    end
  end
  return unheard_node() or silent_node()
end

-- An operator ordered a job off the device: at once, also if nobody waits, and before anybody is granted. One that
-- failed is tried again like a deferred waiter: when something changed, or its time is over. True if the order stands.
local function clear_device()
  local obstacle, is_unseen = clearing_obstacle()
  if is_unseen and S.evict_how == 'once' then
    end_eviction(obstacle) -- else it would keep out the only job that can still go on: the one that is not seen
    return false
  elseif obstacle then
    set_phase('blocked', obstacle)
    return true
  end
  local left = S.evict_until_ms - now
  if left > 0 and left <= MAX_PAUSE_MS and S.evict_tried_ms >= S.changed_ms then
    set_phase('blocked', 'job ' .. S.evict .. ' could not be moved off the device: ' .. S.evict_reason
      .. '; this is tried again by itself, and is over when its processes end')
    return true
  end
  start_swap('', '')
  return true
end

-- A swap that nothing was ordered for yet costs nothing to drop.
local function drop_unplanned_swap()
  if S.swap_step == 'new' and S.swap_waiter ~= '' and not redis.call('ZSCORE', queue_key, S.swap_waiter) then
    clear_swap()
  end
end

-- True if nobody can be granted now whoever asks.
local function is_closed()
  return S.lease_id ~= '' or S.swap_id ~= 0 or pause_reason() ~= '' or S.quiet_until_ms > now
end

local function advance(caller)
  drop_unplanned_swap()
  if S.swap_id ~= 0 then
    return show_swap()
  end
  if S.lease_id == '' and S.evict_how ~= '' and S.quiet_until_ms <= now and clear_device() then
    return
  end
  if is_closed() then
    if S.lease_id == '' then
      if pause_reason() ~= '' then
        set_phase('paused', pause_reason())
      elseif S.quiet_why ~= '' then
        set_phase('blocked', S.quiet_why)
      else
        set_phase('blocked', 'data was lost; waiting for agents and holders to come back')
      end
    end
    return
  end
  local from, phase, reason = 0, 'idle', ''
  while true do
    local batch = redis.call('ZRANGE', queue_key, from, from + 15)
    for _, waiter in ipairs(batch) do
      local record = waiter_get(waiter)
      if is_deferred(record) then
        reason = 'deferred: ' .. record.deferred
      elseif record.job ~= '' and is_alive(waiter) then
        local verdict, detail, for_all = decide(record.job)
        if verdict == 'grant' then
          return grant(waiter, record, detail, 0, caller)
        elseif verdict == 'swap' then
          -- Even its own job gets no short cut after an expiry: first out, with nobody in.
          return start_swap(waiter, S.evict == record.job and '' or record.job)
        end
        phase, reason = 'blocked', detail
        if for_all then -- a long queue must not cost every call a look at all of it
          return set_phase(phase, reason)
        end
      else
        waiter_drop(waiter) -- dead, or a half record that something else left
        from = from - 1
      end
    end
    if #batch < 16 then
      break
    end
    from = from + 16
  end
  set_phase(phase, reason)
end
