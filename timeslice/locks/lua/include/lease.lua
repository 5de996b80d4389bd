-- Granting, ending and reaping of leases. Needs group, waiters, gangs, residency.

-- `caller` is the waiter whose own script this is: it reads the grant in the reply and needs no confirmation.
-- `record.fresh` marks one that was never queued.
local function grant(waiter, record, how, swap_ms, caller)
  local direct, is_gang = waiter == caller, (record.world or '') ~= ''
  local token = draw()
  set('lease_id', waiter)
  set('job', record.job)
  set('host', record.host)
  set('pid', record.pid)
  set('start', record.start)
  set('label', record.label)
  set('lease_ms', tonumber(record.lease_ms) or LEASE_MS)
  if is_gang then
    set('gang', record.world)
    redis.call('HSET', waiters_key, waiter .. '/called', record.name or '')
  end
  set('token', token)
  set('how', how)
  set('swap_ms', swap_ms)
  set('granted_at_ms', now)
  set('renewed_at_ms', now)
  set('confirmed', direct and '1' or '0')
  if direct then
    set('deadline_ms', now + S.lease_ms)
  else
    set('deadline_ms', tonumber(redis.call('ZSCORE', alive_key, waiter)))
  end
  if S.mode == 'served' then
    redis.call('HSET', jobs_key, record.job .. '/token', digits(token), record.job .. '/last_granted_at_ms', digits(now))
    if how ~= 'no-op' then
      redis.call('HSET', jobs_key, record.job .. '/residency', 'resident')
    end
    job_loads_everywhere(record.job) -- also in its next turn, and on other nodes than in the last
  end
  if not record.fresh then
    waiter_remove(waiter)
  end
  set_phase('held', '')
  if not direct or is_gang then -- the other ranks of a gang read it there
    local key = grant_prefix .. waiter
    redis.call('XADD', key, '*', 'kind', 'grant', 'token', digits(token), 'how', how, 'swap_ms', digits(swap_ms),
      'needs_weights', S.mode == 'served' and job_needs_weights(record.job) and '1' or '0')
    redis.call('EXPIRE', key, GRANT_KEEP_S)
  end
  emit('LeaseGranted', 'job', record.job, 'waiter', waiter, 'token', digits(token), 'how', how, 'host', record.host,
    'pid', record.pid, 'label', record.label,
    'waited_ms', digits(math.max(now - (tonumber(record.enqueued_at_ms) or now), 0)), 'swap_ms', digits(swap_ms))
end

local function clear_lease()
  if S.gang ~= '' then
    gang_forget(S.lease_id, world_of(S.gang))
    set('gang', '')
    set('ending', '')
  end
  set('lease_id', '')
  set('job', '')
  set('host', '')
  set('pid', '')
  set('start', '')
  set('label', '')
  set('confirmed', '')
  set('deadline_ms', 0)
  set('changed_ms', now)
  if S.waits_on ~= '' then
    set('waits_on', '')
  end
  local pause = pause_reason()
  set_phase(pause == '' and 'idle' or 'paused', pause)
end

-- Whether the agents of the holder's nodes were told of each process that holds: then it has said where it is.
local function holder_is_on_record()
  local function is_known(host, pid, start)
    return redis.call('ZSCORE', nodes_key, host) and registered_as(S.job, host, pid, start)
  end
  if S.gang == '' then
    return is_known(S.host, S.pid, S.start)
  end
  for rank = 0, world_of(S.gang) - 1 do
    local party = party_get(S.lease_id, rank)
    if not party or not is_known(party.host, party.pid, party.start) then
      return false
    end
  end
  return true
end

-- What its turn leaves behind. A look from within the turn may be older than what was loaded in it. What an earlier turn
-- left, whose holder nobody knew, is in doubt until nothing of the job is there.
local function note_turn()
  local has_said = redis.call('HGET', jobs_key, S.job .. '/said') or ''
  local vouched = (S.how == 'first load' or has_said ~= '') and holder_is_on_record()
  redis.call('HINCRBY', jobs_key, S.job .. '/usage_ms', digits(math.max(now - S.granted_at_ms, 0)))
  redis.call('HSET', jobs_key, S.job .. '/moved', digits(draw()),
    S.job .. '/said', vouched and digits(S.token) or '')
end

local function end_lease(kind, ...)
  local job, held = S.job, math.max(now - S.granted_at_ms, 0)
  emit(kind, 'job', job, 'waiter', S.lease_id, 'token', digits(S.token), 'held_ms', digits(held), 'label', S.label, ...)
  if S.mode == 'served' and S.confirmed == '1' then
    note_turn()
  end
  clear_lease()
end

-- A grant that was never confirmed: no body ran.
local function end_unused(kind, ...)
  if S.mode == 'served' and S.how == 'first load' then
    job_did_not_load(S.job)
  end
  local said = S.job .. '/said'
  if S.mode == 'served' and (redis.call('HGET', jobs_key, said) or '') ~= '' then
    redis.call('HSET', jobs_key, said, digits(S.token)) -- what was known after its last turn is known now
  end
  end_lease(kind, ...)
end

-- Who took a lease or a grant away, and why; for a gang that ended by one of its ranks, why; else '' twice.
local function taken_by(lease)
  local last = redis.call('XREVRANGE', grant_prefix .. lease, '+', '-', 'COUNT', 1)[1]
  local told = {}
  for i = 1, last and #last[2] or 0, 2 do
    told[last[2][i]] = last[2][i + 1]
  end
  if told.kind == 'cancelled' or told.kind == 'ended' then
    return told.by or '', told.reason or ''
  end
  return '', ''
end

-- A holder that is gone without a word: its state must be proved out before anybody is granted.
local function reclaim(why)
  local job, confirmed, lease, is_gang = S.job, S.confirmed == '1', S.lease_id, S.gang ~= ''
  if confirmed then
    end_lease('LeaseReclaimed', 'why', why)
    if S.mode == 'served' then
      set('evict', job)
    end
  else
    end_unused('GrantExpired') -- no body ran: nothing to reclaim
  end
  if is_gang then
    gang_tell(lease, why)
  end
end

-- Somebody has seen a grant or a swap of this number. A lease below it had ended before that began, and is here only
-- because data was lost: its job's state may be off the device.
local function raise_fence(number)
  if number > S.fence then
    set('fence', number)
  end
  if S.lease_id ~= '' and S.token < S.fence then
    reclaim('the server had forgotten that it ended')
  end
end

-- A gang ends for all its ranks, whether it holds or waits: by `rank`, which is there no more. Where bodies run, nobody
-- else is let in before each of the other ranks was told, has ended, or its term is over.
local function gang_end(gang, rank, why)
  if S.lease_id == gang and ranks_unconfirmed(gang) > 0 then
    reclaim(why) -- no body has begun
  elseif S.lease_id == gang then
    if S.ending == '' then
      set('ending', why)
      gang_tell(gang, why)
    end
    if party_leave(gang, rank) then
      reclaim(S.ending)
    end
  else
    emit('WaiterReaped', 'waiter', gang, 'job', redis.call('HGET', waiters_key, gang .. '/job') or '', 'reason', why)
    waiter_drop(gang)
    gang_tell(gang, why)
  end
end

-- A rank hears that its gang is over, and so is there no more. Why; nil if the gang goes on.
local function hear_end(gang, rank)
  if S.lease_id ~= gang or S.ending == '' then
    return nil
  end
  local why = S.ending
  if party_leave(gang, rank) then
    reclaim(why)
  end
  return why
end

local function reap()
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', alive_key, '-inf', '(' .. digits(now), 'LIMIT', 0, 64)) do
    local gang, rank = party_alive(member)
    if not redis.call('ZSCORE', alive_key, member) then
      -- It ended a moment ago, with another rank of its gang.
    elseif gang then
      gang_end(gang, rank, party_named(gang, rank) .. ' gave no sign of life')
      redis.call('ZREM', alive_key, member) -- also if it was half a record
    elseif redis.call('HEXISTS', waiters_key, member .. '/world') == 0 then -- a gang ends by its ranks, who are no later
      emit('WaiterReaped', 'waiter', member, 'job', redis.call('HGET', waiters_key, member .. '/job') or '')
      waiter_remove(member)
    end
  end
  if S.lease_id ~= '' and S.deadline_ms < now then
    reclaim(S.ending == '' and 'expired' or S.ending)
  end
end
